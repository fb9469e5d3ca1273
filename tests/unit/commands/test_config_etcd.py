"""The connection to etcd: read from flags, environment and file; refused if the options contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from kproxy.cli import main
from kproxy.config import load_proxy_config
from kproxy.config.etcd import EtcdOptions, Secret, etcd_options_from
from kproxy.errors import StartupError

SECRET = Secret("hunter2 and more")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A key pair, its authority, another's key, a password, and files that are none of these."""
    directory = tmp_path_factory.mktemp("files")
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    one, other = (authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA) for _ in range(2))
    contents = {
        "ca": authority.cert_pem.bytes(),
        "cert": one.cert_chain_pems[0].bytes(),
        "key": one.private_key_pem.bytes(),
        "other_key": other.private_key_pem.bytes(),
        "encrypted_key": one.private_key_pem.bytes().replace(b"PRIVATE KEY", b"ENCRYPTED PRIVATE KEY"),
        "password": f"{SECRET}\n".encode(),
        "empty": b"",
        "bytes": b"\xff\xfe" + SECRET.encode(),
        "large": bytes((1 << 20) + 1),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in (*contents, "missing")}


def load(files: dict[str, Path], toml: str, **environ: str) -> EtcdOptions:
    file = files["ca"].with_name("kproxy.toml")
    file.write_text(toml)
    flags = {"etcd": "https://localhost:2379"}
    return load_proxy_config(file, flags=flags, environ=environ).etcd_options


def test_flags_win_over_the_environment_over_the_file(files: dict[str, Path]) -> None:
    toml = f'[etcd]\nca = "{files["ca"]}"\nusername = "from the file"\npassword = "{SECRET}"\nserver_name = "a"\n'
    environ = {"KPROXY_ETCD__SERVER_NAME": "b", "KPROXY_ETCD__USERNAME": "from the environment"}
    options = load(files, toml, **environ)
    assert options == EtcdOptions(ca=files["ca"], server_name="b", username="from the environment", password=SECRET)
    file = files["ca"].with_name("kproxy.toml")
    flags = {"etcd": "https://localhost:2379", "etcd_username": "from a flag"}
    assert load_proxy_config(file, flags=flags, environ=environ).etcd_options.username == "from a flag"
    # The same for commands without a file.
    options = etcd_options_from({"etcd_username": "from a flag"}, {**environ, "KPROXY_ETCD__PASSWORD": f"{SECRET}"})
    assert options == EtcdOptions(server_name="b", username="from a flag", password=SECRET)


def test_password_file_is_read_anew_without_line_end(files: dict[str, Path]) -> None:
    options = load(files, f'[etcd]\nusername = "u"\npassword_file = "{files["password"]}"\n')
    assert options.read_password() == SECRET
    files["password"].write_text("another")
    assert options.read_password() == "another"
    files["password"].write_text(SECRET)


@pytest.mark.parametrize(
    ("room", "says"),
    [
        ({"cert": "cert"}, "etcd's cert has no effect without its key: .*--etcd-key FILE"),
        ({"key": "key"}, "etcd's key has no effect without its cert: .*--etcd-cert FILE"),
        ({"cert": "cert", "key": "other_key"}, "do not belong together"),
        ({"cert": "cert", "key": "encrypted_key"}, "key is encrypted|cannot be used"),
        ({"cert": "ca", "key": "empty"}, "etcd's key .*empty holds no private key"),
        ({"cert": "missing", "key": "key"}, "etcd's cert .*missing cannot be read .No such file"),
        ({"ca": "missing"}, "etcd's ca .*missing cannot be read .No such file"),
        ({"ca": "password"}, "etcd's ca .*password holds no certificates"),
        ({"ca": "large"}, "etcd's ca .*large is larger than 1 MiB"),
        ({"username": "text"}, "etcd's user needs a password: .*--etcd-password-file FILE, or set KPROXY_ETCD__PASS"),
        ({"password": "text"}, "password has no effect without its username: .*--etcd-username"),
        ({"password_file": "password"}, "password_file has no effect without its username"),
        ({"username": "text", "password": "text", "password_file": "password"}, "password is given twice"),
        ({"username": "text", "password_file": "missing"}, "password_file .* cannot be read"),
        ({"username": "text", "password_file": "empty"}, "password_file .* is empty"),
        ({"username": "text", "password_file": "bytes"}, "password_file .* is not UTF-8 text"),
        ({"username": "text", "password": ""}, "etcd.password in .*: the value is empty"),
        ({"server_name": ""}, "etcd.server_name in .*: the value is empty"),
        ({"pasword": "text"}, "did you mean etcd.password"),
        ({"password": 123456}, "etcd.password in .*: invalid value .expected"),
    ],
)
def test_conflicting_etcd_options_are_named(files: dict[str, Path], room: dict[str, Any], says: str) -> None:
    values = {
        key: str(files.get(value, SECRET if value else "")) if isinstance(value, str) else value
        for key, value in room.items()
    }
    toml = "[etcd]\n" + "".join(f"{key} = {value!r}\n" for key, value in values.items())
    with pytest.raises(StartupError, match=says) as raised:
        load(files, toml)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert SECRET not in sentence
    assert "123456" not in sentence


def test_etcd_options_without_etcd_are_refused() -> None:
    flags = {"ownership": "kafka", "bootstrap": "a:1", "etcd_ca": "ca.pem"}
    with pytest.raises(StartupError, match="--etcd-ca requires an etcd"):
        load_proxy_config(None, flags=flags, environ={})


def test_password_is_shown_nowhere(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SECRET not in repr(EtcdOptions(username="u", password=SECRET))
    monkeypatch.setenv("KPROXY_OWNERSHIP__ETCD", "http://localhost:2379")
    monkeypatch.setenv("KPROXY_ETCD__USERNAME", "u")
    monkeypatch.setenv("KPROXY_ETCD__PASSWORD", SECRET)
    assert main(["check-config"]) == 0
    said = capsys.readouterr().out
    assert SECRET not in said
    assert "# password is set and not shown" in said
    assert 'username = "u"' in said
    assert main(["serve", "--help"]) == 0
    assert "--etcd-password " not in capsys.readouterr().out
