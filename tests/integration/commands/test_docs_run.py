"""The blocks of docs/security.md, run as printed: configurations are loaded, and commands run in order. Configurations
of other pages are loaded too.

This module creates what a block assumes: files under /etc/kproxy by their names, an etcd with TLS and a password, a
proxy with an admin page in plain text, and one with TLS. Their addresses stand in for the printed ones. A block of
another kind, a file of another name or an address that is not known is a failure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.pipeline.kafka_access import read_access, read_properties
from tests.support.etcd.etcd_secured import PASSWORD, enable_users, tls_etcd
from tests.support.pages import DOCS, Block, blocks, shell
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.security.sasl_client import users_file
from tests.support.security.tls_files import Pair, Signer
from tests.unit.suite.test_deploy import CHART_VALUES

TEXT = (DOCS / "security.md").read_text(encoding="utf-8")
PLACE = "/etc/kproxy/"


CONFIGURATIONS = [
    pytest.param(block.text, id=f"{page}-at-line-{block.line}")
    for page in sorted(path.name for path in DOCS.glob("*.md"))
    for block in blocks(page, "toml")
]


def of_kind(*kinds: str) -> list[Block]:
    return blocks("security.md", *kinds)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, signer: Signer) -> Path:
    """The directory in place of /etc/kproxy, with every file that configurations name there."""
    directory = tmp_path_factory.mktemp("etc")
    pair = signer.issue("pair", "localhost", "127.0.0.1")
    configurations = "".join([TEXT, *(str(each.values[0]) for each in CONFIGURATIONS)])
    for name in set(re.findall(rf"{PLACE}([\w.-]+)", configurations)) | {"tls.crt", "tls.key"}:
        make_file(directory / name, signer, pair)
    return directory


def make_file(file: Path, signer: Signer, pair: Pair) -> None:
    if file.name == "users.toml":
        users_file(file.parent)
    elif file.name.endswith("-crl.pem"):
        file.write_bytes(signer.revoke([]).read_bytes())
    elif file.name == "ca.pem" or file.name.endswith("-ca.pem"):
        file.write_bytes(signer.ca.read_bytes())
    elif file.suffix in (".pem", ".crt"):
        file.write_bytes(pair.cert.read_bytes())
    elif file.suffix == ".key":
        file.write_bytes(pair.key.read_bytes())
    else:
        assert file.name.endswith(("password", "token")), f"no test knows how to make {file.name}"
        file.write_text("a-secret-of-the-page\n")
    file.chmod(0o600)


def test_every_block_is_of_a_known_kind() -> None:
    assert of_kind()
    assert [block.name for block in of_kind() if block.kind not in ("toml", "sh", "yaml", "properties")] == []


def check(text: str, directory: Path) -> None:
    """Check it as a separate file, with an etcd if it names no ownership source."""
    file = directory / "kproxy.toml"
    file.write_text(text.replace("/var/log/kproxy/", f"{directory}/"))
    file.chmod(0o600)
    environ = {}
    if "[brokers]" in text:
        environ["KPROXY_OWNERSHIP__OWNERSHIP"] = "static"
    elif "[ownership]" not in text:
        environ["KPROXY_OWNERSHIP__ETCD"] = "http://127.0.0.1:2379"
    ended = run_kproxy("check-config", "--config", file, environ=environ)
    assert (ended.status, ended.stderr) == (0, "")


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_each_configuration_is_valid_alone(text: str, files: Path, tmp_path: Path) -> None:
    check(text.replace(PLACE, f"{files}/"), tmp_path)


@pytest.mark.parametrize("block", of_kind("yaml"), ids=lambda block: block.name)
def test_values_of_the_chart_are_valid(block: Block, files: Path, tmp_path: Path) -> None:
    known = {value.partition(".")[0] for value in CHART_VALUES}
    assert set(re.findall(r"^(\w+):", block.text, re.MULTILINE)) - known == set()
    config = re.search(r"^config:\n((?: .*\n)+)", block.text, re.MULTILINE)
    assert config is not None
    text = re.sub(r"^  (\w+):$", r"[\1]", config[1], flags=re.MULTILINE)
    # A file of a Secret.
    text = re.sub(
        r"^    (\w+): \{secretName: [\w-]+, key: ([\w.-]+)\}$", rf'\1 = "{files}/\2"', text, flags=re.MULTILINE
    )
    check(text, tmp_path)


@pytest.mark.parametrize("block", of_kind("properties"), ids=lambda block: block.name)
def test_options_of_jobs_are_valid(block: Block, files: Path) -> None:
    access = read_access(read_properties(block.text.replace(PLACE, f"{files}/"), "the page"))
    assert (access.context() is not None, access.credentials is not None) == (True, True)


def admin_page(scheme: str) -> str:
    """The page's configuration for it."""
    pages = [block.text for block in of_kind("toml") if "[admin]" in block.text and "[ownership]" not in block.text]
    [page] = [text for text in pages if ("tls.cert" in text) is (scheme == "https")]
    return page


class Site:
    """The processes that commands use; proxies start when first named."""

    def __init__(self, directory: Path, files: Path, secured: str, stack: ExitStack, etcd: list[str]) -> None:
        self.directory = directory
        self._files = files
        self._secured = secured
        self._stack = stack
        self._etcd = etcd

    def serve(self, name: str, config: str) -> KproxyProcess:
        file = self.directory / f"{name}.toml"
        file.write_text(config.replace(PLACE, f"{self._files}/"))
        arguments = ["serve", "--config", file, *self._etcd, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        return self._stack.enter_context(serving(arguments, self.directory / f"{name}.stderr"))

    @functools.cached_property
    def in_plain_text(self) -> str:
        return self.serve("plain", admin_page("http")).admin

    @functools.cached_property
    def with_tls(self) -> str:
        return self.serve("tls", admin_page("https")).admin.replace("127.0.0.1", "localhost")

    def run(self, block: Block) -> None:
        """Run it in a shell that continues the previous block's."""
        script = block.text.replace(PLACE, f"{self._files}/").replace("https://etcd-0:2379", self._secured)
        if "https://proxy-0.example.org:9644" in script:
            script = script.replace("proxy-0.example.org:9644", self.with_tls)
        elif re.search(r"127\.0\.0\.1:9644|kproxy (table|doctor|own)", script):
            # The default address of commands.
            script = f"export KPROXY_ADMIN=http://{self.in_plain_text}\n" + script.replace(
                "127.0.0.1:9644", self.in_plain_text
            )
        assert re.findall(r"https?://(?!127\.0\.0\.1|localhost)\S+", script) == []
        exports = self.directory / "exports"
        script = f". ./exports\n{script}export -p > exports\n"
        exports.touch()
        shell(script, self.directory, said="a-password\n" * 3)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    etcd: EmbeddedEtcd, files: Path, signer: Signer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("docs")
    # In the reader's directory: the authority, the administrator's password, and rules to try.
    make_file(directory / "ca.pem", signer, Pair(signer.ca, signer.ca))
    (directory / "admin-password").write_text(PASSWORD)
    [rules] = [block.text for block in of_kind("toml") if "[[acls]]" in block.text and "User:alice" in block.text]
    (directory / "new.toml").write_text(f'[ownership]\netcd = "http://127.0.0.1:2379"\n{rules}')
    pair = signer.issue("etcd", "localhost", "127.0.0.1")
    own = ["--etcd", etcd.endpoint, "--prefix", f"/{directory.name}"]
    broker = ["broker", "--node-id", "1", "--data-dir", directory / "data", *own]
    with ExitStack() as stack:
        async with tls_etcd(directory / "etcd", pair) as (server, port):
            await enable_users(server.endpoint, prefix="/kafscale", users=("admin",))
            stack.enter_context(serving(broker, directory / "broker.stderr"))
            yield Site(directory, files, f"https://127.0.0.1{port}", stack, own)
            stack.close()


def test_commands_of_pages_run_in_order(site: Site) -> None:
    for block in of_kind("sh"):
        site.run(block)
