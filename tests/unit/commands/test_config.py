"""Options come from flags, environment and file, in this order; an error names its source and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kproxy.cli.serve import command as serve
from kproxy.config import (
    Address,
    AuditOptions,
    Limits,
    ProxyConfig,
    TopicOwners,
    advertised,
    load_proxy_config,
    load_settings,
    parse_address,
    split_list,
)
from kproxy.config.etcd import EtcdOptions
from kproxy.config.listeners import ListenerConfig
from kproxy.config.proxy import KEYS, flag_of
from kproxy.errors import StartupError

ETCD = {"etcd": "http://127.0.0.1:2379"}


def load(toml: str = "", tmp_path: Path | None = None, **given: object) -> ProxyConfig:
    """Load options with `flags` and `environ`; with an etcd if the case names none."""
    file = None
    if tmp_path is not None:
        file = tmp_path / "kproxy.toml"
        file.write_text(toml)
    flags = {**({} if "etcd" in toml else ETCD), **given.get("flags", {})}  # type: ignore[dict-item]
    return load_proxy_config(file, flags=flags, environ=given.get("environ", {}))  # type: ignore[arg-type]


def error_of(toml: str, tmp_path: Path, **given: object) -> str:
    with pytest.raises(StartupError) as raised:
        load(toml, tmp_path, **given)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?")), sentence
    return sentence


ADDRESSES = {
    "127.0.0.1:9092": Address("127.0.0.1", 9092),
    "localhost:0": Address("localhost", 0),
    "kafka.example.org:65535": Address("kafka.example.org", 65535),
    "[::1]:9092": Address("::1", 9092),
    "[fe80::1%eth0]:1": Address("fe80::1%eth0", 1),
    " 127.0.0.1:1 ": Address("127.0.0.1", 1),
}


@pytest.mark.parametrize(("text", "address"), ADDRESSES.items())
def test_address_is_read_and_written_back(text: str, address: Address) -> None:
    assert parse_address(text, "--listen") == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "no port"),
        ("", "no port"),
        (":9092", "no usable host"),
        ("[]:9092", "no usable host"),
        ("a b:9092", "no usable host"),
        ("http://localhost:9092", "IPv6"),
        ("::1:9092", "brackets"),
        ("localhost:", "no usable port"),
        ("localhost:65536", "no usable port"),
        ("localhost:-1", "no usable port"),
        ("localhost:http", "no usable port"),
        ("localhost:٣", "no usable port"),
        ("localhost:1e3", "no usable port"),
    ],
)
def test_invalid_address_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(StartupError, match=rf"^--listen: .*{reason}"):
        parse_address(text, "--listen")


def test_lists_are_written_with_commas_or_as_lists() -> None:
    assert split_list("a:1, b:2", "--etcd") == ("a:1", "b:2")
    assert split_list(["a:1", "b:2"], "--etcd") == ("a:1", "b:2")
    for empty in ("", "a,,b", [], ["a", ""]):
        with pytest.raises(StartupError, match=r"^--etcd: "):
            split_list(empty, "--etcd")


def test_wildcard_address_cannot_be_advertised() -> None:
    assert advertised(Address("127.0.0.1", 1), None) is None
    assert advertised(Address("0.0.0.0", 1), Address("kafka", 2)) == Address("kafka", 2)
    with pytest.raises(StartupError, match="--advertise"):
        advertised(Address("::", 1), None)
    with pytest.raises(StartupError, match="--advertise"):
        advertised(Address("127.0.0.1", 1), Address("0.0.0.0", 2))


def test_missing_options_use_defaults() -> None:
    config = load()
    assert config == ProxyConfig(
        listeners=(ListenerConfig("", Address("127.0.0.1", 9092), None),),
        admin=None,
        ownership="etcd",
        etcd=("http://127.0.0.1:2379",),
        etcd_options=EtcdOptions(),
        prefix="/kafscale",
        bootstrap=(),
        refresh_s=30.0,
        owners=None,
        alone=False,
        lease_ttl_s=10,
        confirm_acks0=True,
        writer_groups={},
        audit=AuditOptions("none", "__kproxy_audit", None, (), 5.0, 16 << 20),
        limits=Limits(),
        workers=1,
    )


def test_acks_0_confirmation_follows_flag_environment_or_file(tmp_path: Path) -> None:
    assert load("[produce]\nconfirm_acks0 = true\n", tmp_path).confirm_acks0
    assert load(environ={"KPROXY_PRODUCE__CONFIRM_ACKS0": "true"}).confirm_acks0
    assert load(flags={**ETCD, "confirm_acks0": True}).confirm_acks0
    assert not load("[produce]\nconfirm_acks0 = true\n", tmp_path, flags={"confirm_acks0": False}).confirm_acks0
    assert "confirm_acks0" in error_of('[produce]\nconfirm_acks0 = "often"\n', tmp_path)


WRITER_GROUPS = {
    "flag": ("", {}, {"writer_group": ["a=g", "b.c=h,d=g"]}),
    "environment": ("", {"KPROXY_OWN__WRITER_GROUP": "a=g, b.c=h, d=g"}, {}),
    "list": ('[own]\nwriter_group = ["a=g", "b.c=h", "d=g"]\n', {}, {}),
    "text": ('[own]\nwriter_group = "a = g,b.c = h,d=g,a=g"\n', {}, {}),
    "flag over file": ('[own]\nwriter_group = "a=x,e=y"\n', {}, {"writer_group": ["a=g,b.c=h", "d=g"]}),
}


@pytest.mark.parametrize(("toml", "environ", "flags"), WRITER_GROUPS.values(), ids=WRITER_GROUPS)
def test_topics_have_writer_groups(
    tmp_path: Path, toml: str, environ: dict[str, str], flags: dict[str, object]
) -> None:
    assert load(toml, tmp_path, environ=environ, flags=flags).writer_groups == {"a": "g", "b.c": "h", "d": "g"}


def test_group_name_ends_at_first_equals_sign(tmp_path: Path) -> None:
    assert load(flags={"writer_group": ["a=b=ü c"]}).writer_groups == {"a": "b=ü c"}
    assert load("[own]\nwriter_group = []\n", tmp_path).writer_groups == {}


def test_writer_groups_work_for_every_source_with_etcd() -> None:
    kafka = {"ownership": "kafka", "bootstrap": "a:1", "writer_group": ["t=g"]}
    assert load(flags=kafka).writer_groups == {"t": "g"}
    with pytest.raises(StartupError, match=r"^--writer-group requires an etcd, .* --etcd URL"):
        load(flags={**kafka, "etcd": None})


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    toml = '[listen]\nlisten = "file:1"\nadmin = "file:2"\nadvertise = "file:3"\n'
    environ = {"KPROXY_LISTEN__LISTEN": "env:1", "KPROXY_LISTEN__ADMIN": "env:2"}
    config = load(toml, tmp_path, environ=environ, flags={"listen": "flag:1", "admin": None})
    assert (config.listen.host, config.admin, config.advertise) == ("flag", Address("env", 2), Address("file", 3))
    settings = load_settings(tmp_path / "kproxy.toml", environ=environ, flags={"listen": "flag:1"})
    sources = [settings[f"listen.{key}"].source for key in ("listen", "admin", "advertise", "workers")]
    assert sources == [
        "--listen",
        "KPROXY_LISTEN__ADMIN",
        f"listen.advertise in {tmp_path / 'kproxy.toml'}",
        "default",
    ]


def test_limits_are_numbers_from_every_source(tmp_path: Path) -> None:
    config = load("[limits]\nmax_connections = 5\ndrain_s = 2\n", tmp_path, environ={"KPROXY_LIMITS__DRAIN_S": "0.5"})
    assert (config.limits.max_connections, config.limits.drain_s) == (5, 0.5)


def test_etcd_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    assert load('[ownership]\netcd = ["http://a:1", "http://b:2"]', tmp_path).etcd == ("http://a:1", "http://b:2")
    assert load('[ownership]\netcd = "http://a:1,http://b:2"', tmp_path).etcd == ("http://a:1", "http://b:2")


def test_variables_that_name_no_key_are_ignored() -> None:
    assert load(environ={"KPROXY_DEBUG": "1", "KPROXYLISTEN__X": "1", "LISTEN__LISTEN": "x"}) == load()
    # The addresses to which other commands send requests.
    assert load(environ={"KPROXY_ADMIN": "a:1", "KPROXY_BOOTSTRAP": "a:2"}) == load()


UNKNOWN = [
    ("[limits]\nmax_conections = 5", {}, "limits.max_conections", "limits.max_connections"),
    ("[listen]\netcd = 'a:1'", {}, "listen.etcd", "ownership.etcd"),
    ("[limit]\nmax_connections = 5", {}, "[limit]", "[limits]"),
    ("listen = '127.0.0.1:1'", {}, "listen", "[listen]"),
    ("lisen = '127.0.0.1:1'", {}, "lisen", "[listen]"),
    ("", {"KPROXY_LISTEN__LISTN": "x"}, "KPROXY_LISTEN__LISTN", "KPROXY_LISTEN__LISTEN"),
]


@pytest.mark.parametrize(("toml", "environ", "unknown", "nearest"), UNKNOWN)
def test_unknown_key_error_names_the_nearest(
    tmp_path: Path, toml: str, environ: dict[str, str], unknown: str, nearest: str
) -> None:
    sentence = error_of(toml, tmp_path, environ=environ)
    assert f"unknown key {unknown} in " in sentence
    assert sentence.endswith(f"did you mean {nearest}?")


BROKER_AND_TOPIC = "[brokers]\n1 = 'a:1'\n[[topics]]\nname = 't'\n"
WRONG = [
    ("[limits]\nmax_connections = 0", {}, {}, ["limits.max_connections in", ">= 1"]),
    ("[limits]\nmax_connections = '5'", {}, {}, ["limits.max_connections in", "expected `int`"]),
    ("[limits]\nmax_connections = 1.5", {}, {}, ["limits.max_connections in", "expected `int`"]),
    ("[limits]\nmax_open_requests = 9223372036854775808", {}, {}, ["limits.max_open_requests in", "<= 1000000"]),
    ("[limits]\ndrain_s = nan", {}, {}, ["limits.drain_s in"]),
    ("[limits]\ndrain_s = inf", {}, {}, ["limits.drain_s in"]),
    ("[listen]\nlisten = 9092", {}, {}, ["listen.listen in", "expected `str`"]),
    ("", {"KPROXY_LIMITS__MAX_CONNECTIONS": "many"}, {}, ["KPROXY_LIMITS__MAX_CONNECTIONS", "'many'"]),
    ("", {"KPROXY_LISTEN__LISTEN": "nowhere"}, {}, ["KPROXY_LISTEN__LISTEN", "no port"]),
    ("", {}, {"admin": "x:y"}, ["--admin", "port"]),
    ("", {}, {"prefix": "kafscale"}, ["--prefix", "/kafscale"]),
    ("", {}, {"listen": "0.0.0.0:9092"}, ["0.0.0.0", "--advertise"]),
    ("", {}, {"ownership": "zookeeper"}, ["--ownership", "unknown ownership source", "etcd, kafka, static"]),
    ("", {}, {"workers": -1}, ["--workers", ">= 0"]),
    ("", {}, {"workers": 257}, ["--workers", "<= 256"]),
    ("[limits]\nmax_connections = 3\n", {}, {"workers": 4}, ["limits.max_connections is 3", "4 workers"]),
    ("", {}, {"bootstrap": "a:1"}, ["--bootstrap", "--ownership kafka", "etcd"]),
    ("", {}, {"table": "owners.toml"}, ["--table", "--ownership static", "etcd"]),
    ("[brokers]\n1 = 'a:1'", {}, {}, ["brokers in", "--ownership static", "etcd"]),
    ("[[topics]]\nname = 't'\nowners = []", {}, {"ownership": "kafka"}, ["topics in", "--ownership static", "kafka"]),
    ("", {}, {"ownership": "kafka"}, ["--ownership kafka", "--bootstrap"]),
    ("", {}, {"ownership": "kafka", "bootstrap": "a:1,b"}, ["--bootstrap", "'b' has no port"]),
    ("", {}, {"ownership": "kafka", "bootstrap": "a:1,"}, ["--bootstrap", "commas"]),
    ("", {}, {"ownership": "kafka", "bootstrap": "a:0"}, ["--bootstrap", "a:0"]),
    ("[ownership]\nrefresh_s = 0\n", {}, {"ownership": "kafka", "bootstrap": "a:1"}, ["ownership.refresh_s", "0"]),
    ("[ownership]\nrefresh_s = 30\n", {}, {}, ["ownership.refresh_s", "--ownership kafka", "etcd"]),
    ("", {"KPROXY_OWNERSHIP__OWNERSHIP": "kafka"}, {"table": "x"}, ["--table", "--ownership static", "kafka"]),
    ("", {}, {"ownership": "static", "bootstrap": "a:1"}, ["--bootstrap", "--ownership kafka", "static"]),
    ("", {}, {"ownership": "static"}, ["--ownership static", "--table", "[brokers]"]),
    ("", {}, {"ownership": "static", "table": "/missing.toml"}, ["--table /missing.toml", "cannot be read"]),
    ("[brokers]\n1 = 'a:1'", {}, {"ownership": "static", "table": "x"}, ["is given twice", "--table", "brokers in"]),
    ("[brokers]\none = 'a:1'", {}, {"ownership": "static"}, ["static table in", "expected `int`"]),
    ("[brokers]\n-1 = 'a:1'", {}, {"ownership": "static"}, ["static table in", ">= 0"]),
    ("[brokers]\n1 = 9092", {}, {"ownership": "static"}, ["static table in", "expected `str`"]),
    ("[brokers]\n1 = 'a'", {}, {"ownership": "static"}, ["broker 1 in", "no port"]),
    ("[brokers]\n1 = 'a:0'", {}, {"ownership": "static"}, ["broker 1 in", "port 0"]),
    ("brokers = 5", {}, {"ownership": "static"}, ["static table in", "expected `object`"]),
    ("[topics]\nname = 't'\nowners = [1]", {}, {"ownership": "static"}, ["static table in", "expected `array`"]),
    ("[[topics]]\nname = 't'\nowners = [1]", {}, {"ownership": "static"}, ["has no brokers", "[brokers]"]),
    ("[brokers]\n1 = 'a:1'\n[[topics]]\nname = 't'", {}, {"ownership": "static"}, ["static table in", "`owners`"]),
    (f"{BROKER_AND_TOPIC}owner = [1]", {}, {"ownership": "static"}, ["static table in", "`owner`"]),
    (f"{BROKER_AND_TOPIC}owners = [1, 2]", {}, {"ownership": "static"}, ["'t'", "partition 1", "broker 2", "of 1."]),
    (f"{BROKER_AND_TOPIC}owners = [1]\n[[topics]]\nname = 't'\nowners = []", {}, {"ownership": "static"}, ["twice"]),
    ("", {}, {"writer_group": ["t=g,t=h"]}, ["--writer-group", "'t' has two writer groups, 'g' and 'h'"]),
    ("", {}, {"writer_group": ["t=g", "t=h"]}, ["--writer-group", "'t' has two writer groups, 'g' and 'h'"]),
    ("", {}, {"writer_group": ["t"]}, ["--writer-group: 't'", "TOPIC=GROUP"]),
    ("", {}, {"writer_group": ["t="]}, ["--writer-group: 't='", "TOPIC=GROUP"]),
    ("", {}, {"writer_group": ["t=g,"]}, ["--writer-group: ''", "TOPIC=GROUP"]),
    ("", {}, {"writer_group": ["=g"]}, ["--writer-group: ''", "cannot be a topic"]),
    ("", {}, {"writer_group": ["t/0=g"]}, ["--writer-group: 't/0'", "cannot be a topic"]),
    ("", {}, {"writer_group": ["..=g"]}, ["--writer-group: '..'", "cannot be a topic"]),
    ("", {}, {"writer_group": ["t" * 250 + "=g"]}, ["--writer-group", "cannot be a topic"]),
    ("", {}, {"writer_group": ["t=" + "ü" * 513]}, ["--writer-group", "'t'", "1024 bytes"]),
    ("", {"KPROXY_OWN__WRITER_GROUP": ""}, {}, ["KPROXY_OWN__WRITER_GROUP", "TOPIC=GROUP"]),
    ("[own]\nwriter_group = ['t']", {}, {}, ["own.writer_group in", "TOPIC=GROUP"]),
    ("[own]\nwriter_group = 5", {}, {}, ["own.writer_group in", "expected"]),
    ("[own]\nwriter_groups = 't=g'", {}, {}, ["own.writer_groups", "own.writer_group?"]),
    ("[limits]\nown_timeout_s = 0", {}, {}, ["limits.own_timeout_s"]),
    ("[listen", {}, {}, ["--config", "is not TOML", "Expected"]),
    ("[listen]\nlisten = 'a:1'\nlisten = 'b:1'", {}, {}, ["--config", "is not TOML"]),
]


@pytest.mark.parametrize(("toml", "environ", "flags", "parts"), WRONG)
def test_wrong_value_is_named_with_its_source(
    tmp_path: Path, toml: str, environ: dict[str, str], flags: dict[str, object], parts: list[str]
) -> None:
    sentence = error_of(toml, tmp_path, environ=environ, flags=flags)
    assert [part for part in parts if part not in sentence] == [], sentence


def test_table_file_may_hold_nothing_else(tmp_path: Path) -> None:
    table = tmp_path / "owners.toml"
    table.write_text("[brokers]\n1 = 'a:1'\n[topic]\nname = 't'\n")
    sentence = error_of("", tmp_path, flags={"ownership": "static", "table": str(table)})
    assert sentence == f"unknown key [topic] in {table}: did you mean [topics]?"


def test_static_table_is_read_from_either_place(tmp_path: Path) -> None:
    toml = """
        [brokers]
        7 = "[::1]:9092"
        1 = "a:1"
        [[topics]]
        name = "t"
        owners = [1, 7, 1]
        [[topics]]
        name = "empty"
        owners = []
    """
    brokers = {1: Address("a", 1), 7: Address("::1", 9092)}
    topics = (TopicOwners("t", (1, 7, 1)), TopicOwners("empty", ()))
    inline = load(toml, tmp_path, flags={"ownership": "static", "etcd": None})
    assert (inline.ownership, inline.etcd, inline.bootstrap) == ("static", (), ())
    table = tmp_path / "owners.toml"
    table.write_text(toml)
    for config in (inline, load(flags={"ownership": "static", "table": str(table)})):
        owners = config.owners
        assert owners is not None
        assert (owners.brokers, owners.topics) == (brokers, topics)
        assert Path(owners.where).parent == tmp_path


def test_reloaded_static_table_is_validated_again(tmp_path: Path) -> None:
    toml = '[brokers]\n1 = "a:1"\n[[topics]]\nname = "t"\nowners = [1]\n'
    table = tmp_path / "owners.toml"
    table.write_text(toml)
    alone = load(flags={"ownership": "static", "table": str(table)})
    inline = load(toml, tmp_path, flags={"ownership": "static"})
    # An invalid source would leave every topic without owners.
    misspelt = toml.replace("topics", "topic")
    for config in (alone, inline):
        assert config.given is not None
        assert config.owners is not None
        Path(config.owners.where).write_text(misspelt)
        with pytest.raises(StartupError, match=r"unknown key"):
            config.given.again()
        Path(config.owners.where).unlink()
        with pytest.raises(StartupError, match=r"cannot be read"):
            config.given.again()


def test_kafka_cluster_is_named_by_its_brokers(tmp_path: Path) -> None:
    config = load(flags={"ownership": "kafka", "bootstrap": "a:1, [::1]:2", "etcd": None})
    assert (config.bootstrap, config.etcd, config.owners) == ((Address("a", 1), Address("::1", 2)), (), None)
    toml = '[ownership]\nownership = "kafka"\nbootstrap = ["a:1", "[::1]:2"]\n'
    assert load(toml, tmp_path).bootstrap == config.bootstrap


def test_proxies_of_any_source_register_in_etcd(tmp_path: Path) -> None:
    kafka = load(flags={"ownership": "kafka", "bootstrap": "a:1", "etcd": "http://e:1,http://f:2", "lease_ttl": 3})
    assert (kafka.etcd, kafka.lease_ttl_s, kafka.alone) == (("http://e:1", "http://f:2"), 3, False)
    toml = '[ownership]\nownership = "static"\netcd = "http://e:1"\n[fleet]\nalone = true\n[brokers]\n1 = "a:1"\n'
    static = load(toml, tmp_path)
    assert (static.etcd, static.alone) == (("http://e:1",), True)


@pytest.mark.parametrize("ttl", ["0", "3601", "1.5", "soon"])
def test_lease_lasts_some_whole_seconds(ttl: str) -> None:
    assert error_of("", None, environ={"KPROXY_FLEET__LEASE_TTL": ttl}).startswith("KPROXY_FLEET__LEASE_TTL: ")


def test_etcd_endpoint_is_required() -> None:
    with pytest.raises(StartupError, match="--etcd"):
        load_proxy_config(environ={})


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"missing\.toml cannot be read"):
        load_proxy_config(tmp_path / "missing.toml", environ={})
    with pytest.raises(StartupError, match="cannot be read"):
        load_proxy_config(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes("# é".encode("latin-1"))
    with pytest.raises(StartupError, match="UTF-8"):
        load_proxy_config(tmp_path / "latin.toml", environ={})


def test_option_is_documented_with_flag_and_default() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+(?:\.\w+)+)` \| ([^|]*)\| `?([^|`]+?)`? \|", text, re.MULTILINE)
    options = {each.name: ", ".join(f"`{name}`" for name in each.opts + each.secondary_opts) for each in serve.params}
    assert {path: flag.strip() for path, flag, _ in rows} == {path: options.get(flag_of(path), "") for path in KEYS}
    assert {flag_of(path) for path in KEYS} >= options.keys() - {"config"}
    settings = load_settings(environ={})
    given = {path: str(setting.value).lower() for path, setting in settings.items() if setting.value is not None}
    assert {path: default.lower() for path, _, default in rows if path in given} == given
