"""Files of deploy/ name only flags, options, variables, metrics and ports that exist, and all have one version.

The files are read as text; `make check-deploy` checks them with their own tools.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from kproxy.cli import cli
from kproxy.config import DEFAULT_ADMIN, DEFAULT_LISTEN, build_proxy_config, load_settings, parse_address
from kproxy.config.proxy import SECTIONS

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm/kproxy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tgz"))
RENDERED = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = (DEPLOY / "compose/kafka.yaml", DEPLOY / "compose/reference.yaml")
KEYS = {f"{room}.{key}" for room, struct in SECTIONS.items() for key in struct.__struct_fields__}
VARIABLES = {"KPROXY_" + key.replace(".", "__").upper() for key in KEYS}
# Variables of the program itself, of commands that ask, and of the build.
OTHER_VARIABLES = {
    "KPROXY_LOG_LEVEL",
    "KPROXY_LOG_FORMAT",
    "KPROXY_DEBUG",
    "KPROXY_ADMIN",
    "KPROXY_BOOTSTRAP",
    "KPROXY_COMMIT",
}
# Flags of other programs, by the file that has them.
OTHERS_FLAGS = {
    "compose/kafka.yaml": {"advertise-client-urls", "build", "data-dir", "listen-client-urls"},
    "compose/reference.yaml": {"advertise-client-urls", "build", "listen-client-urls"},
    "docker/Dockerfile": {
        *("build-arg", "chown", "from", "help", "interval", "retries", "sbom", "start-period", "timeout"),
        *("no-install-recommends", "yes"),
    },
    "docker/install.sh": {
        *("disable-pip-version-check", "no-cache-dir", "no-build-isolation", "no-deps", "no-index", "only-binary"),
        *("output-file", "output-format", "output-reproducible", "pyproject", "python", "quiet", "require-hashes"),
        *("wheel-dir", "without-pip"),
    },
    "etcd/roles.sh": {"prefix"},
    "helm/kproxy/README.md": {"create-namespace", "set"},
    "systemd/kproxy-broker@.service": {"now"},
}
ADMIN_PATHS = {"/livez", "/metrics", "/readyz"}
# Ports in these files: kproxy's own two first.
KAFKA_PORT = parse_address(DEFAULT_LISTEN, "").port
ADMIN_PORT = parse_address(DEFAULT_ADMIN, "").port


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def chart_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart", REPOSITORY / "scripts/chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHART_VALUES = [value.path for value in chart_script().values((CHART / "values.yaml").read_text().splitlines())]


def command_named(name: str, group: click.Group = cli) -> click.Command:
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"there is no command {name}"
    return command


def flags_of(command: click.Command) -> set[str]:
    """The flags of a command and of its subcommands."""
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")}
    if not isinstance(command, click.Group):
        return found
    return found.union(*(flags_of(command_named(n, command)) for n in command.list_commands(click.Context(command))))


FLAGS = {flag.removeprefix("--") for flag in flags_of(cli)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_flags_exist_in_the_commands(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", path.read_text()))
    assert named - FLAGS - OTHERS_FLAGS.get(name_of(path), set()) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_variables_and_keys_exist_in_the_configuration(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"\bKPROXY_[A-Z0-9_]+", text)) - VARIABLES - OTHER_VARIABLES == set()
    # In the chart's values, an option stands below `config`.
    text = re.sub(r"\bconfig\.(?=[a-z]+\.)", "", text)
    named = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z][A-Za-z0-9_]*)(?![\w/-]|\.[a-z])", text))
    # Files in a Secret of Kubernetes.
    known = KEYS | {"tls.crt"} | set(CHART_VALUES) | {value.rpartition(".")[0] for value in CHART_VALUES}
    assert named - known == set()


def documented_labels() -> dict[str, set[str]]:
    """Labels by sample name, as in docs/metrics.md, which another test compares with real pages."""
    labels: dict[str, set[str]] = {}
    text = (REPOSITORY / "docs/metrics.md").read_text()
    for name, listed, meaning in re.findall(r"^\| `(kproxy_\w+)` \| (.*?) ?\| (.*) \|$", text, re.MULTILINE):
        found = set(re.findall(r"`(\w+)`", listed))
        suffixes = ("_bucket", "_sum", "_count") if meaning.startswith("histogram") else ("",)
        labels |= {name + suffix: found | ({"le"} if suffix == "_bucket" else set()) for suffix in suffixes}
    return labels


def expressions(path: Path) -> Iterator[str]:
    if path.suffix == ".json":
        text = json.loads(path.read_text())
        for panel in text["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))
        for variable in text["templating"]["list"]:
            if variable["type"] == "query":
                yield variable["query"]["query"]
    else:
        yield from re.findall(r"^        expr: ((?:\|\n(?: {10}.*\n)+)|.*)", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted((CHART / "files").iterdir()), ids=name_of)
def test_metrics_and_labels_match_the_admin_pages(path: Path) -> None:
    labels_of = documented_labels()
    every_job = {"job", "instance", "namespace", "pod"}
    found = list(expressions(path))
    assert len(found) > 15
    for expression in found:
        names = set(re.findall(r"\bkproxy_\w+", expression))
        assert names <= labels_of.keys(), expression
        grouped = ",".join(re.findall(r"(?:by|on|without) \(([^)]*)\)", expression))
        labels = set(re.findall(r"[a-z_]+", grouped)) | set(re.findall(r"[{,](\w+)=~?\"", expression)) - {"__name__"}
        allowed = every_job.union(*(labels_of[name] for name in names))
        assert labels <= allowed, expression


def parsed(arguments: list[str]) -> dict[str, object]:
    """Parse a command's name and arguments with click. Raises click's errors."""
    return dict(command_named(arguments[0]).make_context(arguments[0], arguments[1:]).params)


def of_manifest(path: Path) -> tuple[list[str], str]:
    """The container's arguments, and the configuration file in the ConfigMap."""
    text = path.read_text()
    block = re.findall(r"^( +)args:\n((?:\1  - .*\n)+)", text, re.MULTILINE)[0][1]
    arguments = [line.strip().removeprefix("- ") for line in block.splitlines()]
    toml = re.findall(r"^  kproxy.toml: \|\n((?:    .*\n)+)", text, re.MULTILINE)[0]
    return arguments, "\n".join(line.strip() for line in toml.splitlines())


@pytest.mark.parametrize("path", RENDERED, ids=name_of)
def test_manifests_give_a_valid_configuration(path: Path, tmp_path: Path) -> None:
    arguments, toml = of_manifest(path)
    # The files of Secrets do not exist here.
    sections = tomllib.loads(toml)
    text = toml.replace("[etcd]\n", "", 1).partition("[limits]") if "etcd" in sections else ("", "", toml)
    file = tmp_path / "kproxy.toml"
    file.write_text("".join(text[1:]))
    flags = parsed([each.replace("$(POD_NAME)", "pod-0") for each in arguments])
    assert str(flags.pop("config")) == "/etc/kproxy/kproxy.toml"
    config = build_proxy_config(load_settings(file, flags=flags, environ={}))
    assert set(sections.get("etcd", {})) <= set(SECTIONS["etcd"].__struct_fields__)
    assert config.admin is not None
    manifest = path.read_text()
    assert {int(port) for port in re.findall(r"^ +containerPort: (\d+)$", manifest, re.MULTILINE)} <= {
        config.listen.port,
        config.admin.port,
    }
    probes = re.findall(r"httpGet:\n +path: (\S+)\n +port: (\d+)", manifest)
    assert len(probes) == 2
    assert {probe[0] for probe in probes} <= ADMIN_PATHS
    assert {int(probe[1]) for probe in probes} == {config.admin.port}
    grace_s = int(re.findall(r"terminationGracePeriodSeconds: (\d+)", manifest)[0])
    assert grace_s >= config.limits.drain_delay + config.limits.drain_s + 20
    if path.name.startswith("sidecar"):
        assert config.alone
        assert config.listen.host == "127.0.0.1"
        assert re.search(r"initContainers:\n +- name: kproxy\n(?: +.*\n)*? +restartPolicy: Always\n", manifest)
    else:
        assert config.advertise is not None
        assert config.advertise.host == "pod-0.kproxy-headless.kproxy.svc.cluster.local"
        assert config.limits.drain_delay > 0


def services(path: Path) -> dict[str, str]:
    """The text of each service of a compose file."""
    block = path.read_text().partition("\nservices:\n")[2].partition("\nvolumes:")[0]
    parts = re.split(r"^  ([a-z0-9-]+):\n", block, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def command_of(service: str) -> list[str]:
    inline = re.findall(r"^ +command: \[(.*)\]$", service, re.MULTILINE)
    if inline:
        return [each.strip().strip('"') for each in inline[0].split(", ")]
    block = re.findall(r"^    command:\n((?:      - .*\n)+)", service, re.MULTILINE)
    return [line.strip().removeprefix("- ") for line in block[0].splitlines()] if block else []


@pytest.mark.parametrize("path", COMPOSE, ids=name_of)
def test_compose_files_give_valid_options(path: Path) -> None:
    text = path.read_text()
    environ = dict(re.findall(r'^ +(KPROXY_\w+): "?([^"\n]+)"?$', text, re.MULTILINE))
    proxies = brokers = 0
    for name, service in services(path).items():
        arguments = command_of(service)
        if arguments[:1] == ["serve"]:
            proxies += 1
            config = build_proxy_config(load_settings(None, flags=parsed_flags(arguments), environ=environ))
            assert config.admin is not None
            published = re.findall(r'"127\.0\.0\.1:(\d+):(\d+)"', service)
            assert {int(inner) for _, inner in published} == {config.listen.port, config.admin.port}
            # The advertised address leads to the proxy from this machine.
            assert config.advertise is not None
            assert (str(config.advertise.port), str(config.listen.port)) in published
            assert float(re.findall(r"stop_grace_period: (\d+)s", text)[0]) >= (
                config.limits.drain_delay + config.limits.drain_s + 20
            )
            assert config.admin.port == ADMIN_PORT, "where the image's health check looks"
        elif arguments[:1] == ["broker"]:
            brokers += 1
            flags = parsed(arguments)
            assert str(flags["advertise"]).startswith(f"{name}:")
            assert str(flags["data_dir"]).startswith("/var/lib/kproxy/")
    assert (proxies, brokers) == ((2, 3) if path.name == "reference.yaml" else (2, 0))


def parsed_flags(arguments: list[str]) -> dict[str, object]:
    flags = parsed(arguments)
    flags.pop("config")
    return flags


def test_compose_mounts_and_scrapes_existing_files() -> None:
    path = DEPLOY / "compose/kafka.yaml"
    mounted = re.findall(r"- (\.[^:]+):", path.read_text())
    assert len(mounted) == 5
    assert all((path.parent / each).is_file() for each in mounted)
    scraped = re.findall(r'"([a-z0-9-]+):(\d+)"', (path.parent / "prometheus.yaml").read_text())
    assert {name for name, _ in scraped} == {name for name in services(path) if name.startswith("proxy-")}
    assert {int(port) for _, port in scraped} == {ADMIN_PORT}


def test_image_exposes_and_probes_example_ports() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    assert re.findall(r"^EXPOSE (\d+) (\d+)$", text, re.MULTILINE) == [(str(KAFKA_PORT), str(ADMIN_PORT))]
    assert f"http://127.0.0.1:{ADMIN_PORT}/readyz" in text


def unit(name: str) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def environment_file(name: str, *, commented: bool = False) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    wanted = [line[1:] if commented and re.match(r"#[A-Z]", line) else line for line in lines]
    return dict(line.split("=", 1) for line in wanted if re.match(r"[A-Z]", line))


def test_proxy_unit_and_its_environment_are_accepted() -> None:
    service, environ = unit("kproxy.service"), environment_file("kproxy.env")
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == "/opt/kproxy/bin/kproxy"
    config = build_proxy_config(load_settings(None, flags=parsed_flags(arguments), environ=environ))
    assert int(service["TimeoutStopSec"]) >= config.limits.drain_delay + config.limits.drain_s + 20
    assert config.limits.drain_delay > 0
    # Options in comments must be valid too, even if their files do not exist.
    load_settings(None, environ=environment_file("kproxy.env", commented=True))


def test_broker_unit_and_its_environment_are_accepted() -> None:
    service, environ = unit("kproxy-broker@.service"), environment_file("broker.env")
    line = service["ExecStart"].replace("%i", "1").replace("$OPTIONS", environ["OPTIONS"])
    for name, value in environ.items():
        line = line.replace(f"${{{name}}}", value)
    flags = parsed(shlex.split(line)[1:])
    assert (flags["node_id"], flags["listen"], flags["prefix"]) == (1, environ["LISTEN"], "/kproxy")
    assert "$" not in line


@pytest.mark.parametrize("name", ["kproxy.service", "kproxy-broker@.service"])
def test_units_use_readiness_and_exit_status(name: str) -> None:
    service = unit(name)
    assert service["Type"] == "notify"
    # The exit status of a process that refuses to start.
    assert service["RestartPreventExitStatus"] == "2"
    assert int(service["LimitNOFILE"]) >= 23_000


def version() -> str:
    return str(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"])


def test_all_files_have_the_projects_version() -> None:
    named = re.findall(r"^(?:appVersion|version): (\S+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE)
    named += re.findall(r'image\.version="([^"]+)"', (DEPLOY / "docker/Dockerfile").read_text())
    for path in (*FILES, REPOSITORY / "scripts/try_compose.sh"):
        named += re.findall(r"\bkproxy:(\d[\w.]*)", path.read_text())
    assert set(named) == {version()}


def pins(path: Path) -> dict[str, str]:
    """The lines of each package, with hashes, by its name."""
    parts = re.split(r"^(?=[a-z0-9])", path.read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("==")[0]: re.sub(r"\s+#.*", "", part) for part in parts}


def test_image_has_the_tested_versions() -> None:
    image, tested = pins(DEPLOY / "docker/requirements.lock"), pins(REPOSITORY / "requirements.lock")
    assert len(image) > 15
    assert {name: tested.get(name) for name in image} == image
