"""Listeners with different requirements, and a client's principal there: by SASL, by its certificate, or anonymous."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kproxy_codec.api_keys import SASL_HANDSHAKE
from kproxy_codec.error_codes import ILLEGAL_SASL_STATE, NONE, TOPIC_AUTHORIZATION_FAILED
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import served
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.waiting import eventually

T0 = ("t", 0)
RULE = 'tls.principal_mapping_rules = "RULE:.*CN=([^,]+-[0-9]+).*/$1/L"\n'
MAY_WRITE = '[[acls]]\nprincipal = "{}"\noperations = ["write"]\ntopics = ["t"]\n'


class Site:
    """A proxy's configuration, the certificates, and its listeners' ports once it serves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.signer = Signer(directory / "ca")
        self.server = self.signer.issue("server", "localhost")
        self.tls = f'tls.cert = "{self.server.cert}"\ntls.key = "{self.server.key}"\n'
        self.mutual = self.tls + f'tls.client_ca = "{self.signer.ca}"\n' + RULE
        self.ports: dict[str, int] = {}

    def listener(self, name: str, text: str) -> str:
        return f'[[listeners]]\nname = "{name}"\nlisten = "127.0.0.1:0"\n{text}'

    def sasl(self, *mechanisms: str) -> str:
        return f'[sasl]\nmechanisms = {json.dumps(mechanisms)}\nusers = "{sasl.users_file(self.directory)}"\n'

    @asynccontextmanager
    async def serving(self, text: str) -> AsyncIterator[KproxyProcess]:
        async with served(self.directory, answers_everything, rooms=text, listen=None) as site:
            for each in site.process.fields["listeners"].split(","):
                name, _, address = each.partition("@")
                self.ports[name] = int(address.rpartition(":")[2])
            yield site.process

    async def client(self, listener: str, pair: Pair | None = None) -> RawClient:
        tls = client_context(self.signer.ca, pair) if listener != "plain" else None
        return await RawClient().connect(self.ports[listener], tls=tls)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def produced(client: RawClient, n: int = 0) -> int:
    """The error of a write."""
    client.send(produce_frame(records=batch(n, producer_id=-1)))
    return (await client.answer()).codes[T0]


async def test_each_listener_has_its_own_security(site: Site) -> None:
    text = site.sasl("PLAIN", "SCRAM-SHA-512") + MAY_WRITE.format("User:alice") + MAY_WRITE.format("User:app-1")
    text += f'[audit]\nsink = "json:{site.directory / "trail"}"\ninterval_s = 0.1\n'
    text += site.listener("plain", "sasl = []\n")
    text += site.listener("mutual", site.mutual + "sasl = []\n")
    text += site.listener("secure", site.tls + 'sasl = ["PLAIN"]\n')
    app, other, strange = (
        site.signer.issue(name, f"{name}.example.org", common_name=name) for name in ("APP-1", "other-2", "strange")
    )
    async with site.serving(text) as process:
        # alice logs in with a password.
        secure = await site.client("secure")
        secure.send(sasl.handshake("SCRAM-SHA-512"))
        assert (await secure.answer(SASL_HANDSHAKE, 1)).message.mechanisms == ["PLAIN"]
        for name, code in (("alice", NONE), ("bob", TOPIC_AUTHORIZATION_FAILED)):
            secure = await site.client("secure")
            await sasl.log_in(secure, name)
            assert await produced(secure) == code
        unknown = await site.client("secure")
        unknown.send(produce_frame())
        assert await unknown.is_closed()
        # The application presents a certificate.
        mutual = await site.client("mutual", app)
        assert [await produced(mutual, n) for n in range(5)] == [NONE] * 5
        assert await produced(await site.client("mutual", other)) == TOPIC_AUTHORIZATION_FAILED
        mutual.send(sasl.handshake("PLAIN"))
        assert (await mutual.answer(SASL_HANDSHAKE, 1)).message.error_code == ILLEGAL_SASL_STATE
        assert await produced(mutual) == NONE
        assert await (await site.client("mutual", strange)).is_closed()
        await eventually(lambda: "its certificate's name matches no rule" in process.stderr(), "the reason is logged")
        # Nobody logs in here.
        assert await produced(await site.client("plain")) == TOPIC_AUTHORIZATION_FAILED

        def told() -> str:
            return "".join(file.read_text() for file in (site.directory / "trail").rglob("*.json*"))

        await eventually(lambda: "User:alice" in told() and "User:app-1" in told(), "the trail names both")


async def test_unmapped_certificate_is_refused_without_acls(site: Site) -> None:
    async with site.serving(site.listener("mutual", site.mutual)):
        for name, is_mapped in (("app-1", True), ("strange", False)):
            client = await site.client("mutual", site.signer.issue(name, f"{name}.example.org", common_name=name))
            if is_mapped:
                assert await produced(client) == NONE
            else:
                assert await client.is_closed()


async def test_alternative_names_name_clients(site: Site) -> None:
    """By URI, or by DNS name without a URI; an ambiguous certificate gets no rights, and the log has the reason."""
    text = "".join(MAY_WRITE.format(f"User:{name}") for name in ("app", "host", "*.example.org", "admin"))
    text += MAY_WRITE.format("Group:admins")
    rules = r"RULE:^spiffe:\/\/example\.org\/([^\/]+)$/$1/, RULE:^([^.]+)\.example\.org$/$1/L"
    mutual = site.tls + f'tls.client_ca = "{site.signer.ca}"\n'
    by_rules = mutual + f"tls.principal_mapping_rules = '{rules}'\n"
    text += site.listener("rules", by_rules + 'tls.principal_from = ["uri", "dns"]\n')
    text += site.listener("whole", mutual + 'tls.principal_from = "dns"\n')

    def pair(stem: str, *names: tuple[str, bytes]) -> Pair:
        return site.signer.issue_named(stem, *names, common_name="admin", unit="admins")

    uri, host, other = ("URI", b"spiffe://example.org/app"), ("DNS", b"HOST.example.org"), ("DNS", b"other.example.org")
    admitted = (
        ("rules", pair("uri", host, uri, other), NONE),
        ("rules", pair("dns", host), NONE),
        # Neither the subject nor its group counts.
        ("rules", pair("stranger", other), TOPIC_AUTHORIZATION_FAILED),
        ("whole", pair("wildcard", ("DNS", b"*.example.org")), NONE),
    )
    others = (
        ("rules", pair("twice", host, other), "names give several principals"),
        ("whole", pair("many", host, uri, other), "names give several principals"),
        ("rules", pair("everybody", ("DNS", b"*.example.org")), "name gives no valid principal"),
        ("rules", pair("unmatched", ("URI", b"https://example.org/app"), host), "name matches no rule"),
        ("rules", pair("none"), "has no uri or dns name"),
        ("rules", pair("nul", ("URI", b"spiffe://example.org/app\0x")), "has a malformed uri name"),
        ("rules", pair("line", ("URI", b"spiffe://example.org/app\n"), uri), "has a malformed uri name"),
        ("whole", pair("bytes", ("DNS", b"\xe4.example.org")), "is not accepted: a name in it is not UTF-8"),
    )
    async with site.serving(text) as process:
        for listener, shown, code in admitted:
            assert await produced(await site.client(listener, shown)) == code
        for listener, shown, reason in others:
            said = len(process.stderr())
            assert await (await site.client(listener, shown)).is_closed(), reason
            await eventually(lambda said=said, reason=reason: reason in process.stderr()[said:], reason)
        assert "Traceback" not in process.stderr()


async def test_certificate_alone_names_the_quotas_principal(site: Site) -> None:
    text = '[[quotas]]\nprincipal = "User:app-1"\nproduce_bytes_per_s = 1000\nconnections = 2\n'
    text += site.listener("plain", "") + site.listener("mutual", site.mutual) + site.listener("other", site.mutual)
    app, another = (site.signer.issue(name, f"{name}.example.org", common_name=name) for name in ("app-1", "another-1"))
    async with site.serving(text):
        limited, free = await site.client("mutual", app), await site.client("mutual", another)
        frame = produce_frame(records=batch(0, producer_id=-1) + bytes(1500))
        told = {}
        for client in (limited, free):
            client.send(frame)
            answer = await client.answer()
            assert answer.codes == {T0: NONE}
            told[client] = answer.fields["throttle_time_ms"]
        assert told[free] == 0 < told[limited]
        assert await produced(await site.client("plain")) == NONE
        # The connections of all listeners count together.
        second = await site.client("other", app)
        assert await produced(await site.client("other", another)) == NONE
        assert await (await site.client("other", app)).is_closed()
        second.abort()


async def test_groups_of_a_renewed_session_count(site: Site, tmp_path: Path) -> None:
    """Also for routes that the compiled path has kept."""
    (tmp_path / "jwks.json").write_text(sasl.jwks())
    text = '[sasl]\nmechanisms = "OAUTHBEARER"\n[oauth]\n'
    text += f'jwks = "{tmp_path / "jwks.json"}"\nissuer = "{sasl.ISSUER}"\naudience = "{sasl.AUDIENCE}"\n'
    text += 'groups_claim = "roles"\n' + MAY_WRITE.format("Group:writers") + site.listener("secure", site.tls)
    async with site.serving(text):
        client = await site.client("secure")
        for roles, code in ((["writers"], NONE), ([], TOPIC_AUTHORIZATION_FAILED), (["a", "writers"], NONE)):
            told = await sasl.present(client, sasl.bearer(sasl.token(roles=roles)), "OAUTHBEARER")
            assert told.error_code == NONE
            assert [await produced(client, n) for n in range(5)] == [code] * 5
            # At the earliest a second after the last success.
            await asyncio.sleep(1.1)
