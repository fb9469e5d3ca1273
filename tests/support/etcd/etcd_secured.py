"""Run etcd with TLS, client certificates and users, for tests."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.etcd.embedded import QUICK
from tests.support.etcd.etcd_cluster import EtcdCluster, Member
from tests.support.processes.ports import free_ports
from tests.support.security.tls_files import Pair, Signer

PASSWORD = "correct horse battery staple"


def tls_arguments(plain: str, port: int, pair: Pair, clients: Path | None = None, host: str = "127.0.0.1") -> list[str]:
    """etcd's flags for TLS on `port` beside the URL `plain`; `clients`: the authority of client certificates."""
    arguments = ["--listen-client-urls", f"{plain},https://{host}:{port}"]
    arguments += ["--cert-file", str(pair.cert), "--key-file", str(pair.key)]
    return arguments + (["--client-cert-auth", "--trusted-ca-file", str(clients)] if clients is not None else [])


@asynccontextmanager
async def tls_etcd(directory: Path, pair: Pair, clients: Path | None = None) -> AsyncIterator[tuple[EmbeddedEtcd, str]]:
    """One etcd that listens for plain connections, and for TLS at `https://{host}:PORT`; returns its `:PORT`."""
    plain, port = free_ports(2)
    arguments = tls_arguments(f"http://127.0.0.1:{plain}", port, pair, clients)
    async with EmbeddedEtcd(directory, client_port=plain, extra_arguments=[*QUICK, *arguments]) as server:
        yield server, f":{port}"


class TlsCluster(EtcdCluster):
    """Three members with a certificate each, only for its own name: a name, an IPv4 and an IPv6 address."""

    names = ("localhost", "127.0.0.1", "::1")

    def __init__(self, directory: Path, authority: Signer) -> None:
        super().__init__(directory)
        self._pairs = [authority.issue(name) for name in self.names]
        self._ports = free_ports(3)

    @property
    def tls_endpoints(self) -> list[str]:
        hosts = [f"[{name}]" if ":" in name else name for name in self.names]
        return [f"https://{host}:{port}" for host, port in zip(hosts, self._ports, strict=True)]

    def start_member(self, member: Member) -> None:
        place = self.members.index(member)
        host = "[::1]" if ":" in self.names[place] else "127.0.0.1"
        arguments = tls_arguments(member.endpoint, self._ports[place], self._pairs[place], host=host)
        member.start(self._initial_cluster, self._token, arguments)


async def ask_gateway(endpoint: str, path: str, message: Mapping[str, Any], token: str = "") -> dict[str, Any]:
    """Etcd's JSON answers to calls that the product does not make."""
    headers = {"Authorization": token} if token else {}
    request = urllib.request.Request(f"{endpoint}/v3/{path}", json.dumps(message).encode(), headers)

    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    return await asyncio.to_thread(ask)


async def enable_users(endpoint: str, *, prefix: str = "/", users: Sequence[str] = ("kproxy",)) -> None:
    """Enable users: `root` and `users`, all with PASSWORD; `users` may do everything under `prefix`, nothing else."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    key, range_end = (_base64(text) for text in (prefix, end))
    await ask_gateway(endpoint, "auth/role/add", {"name": "limited"})
    permission = {"permType": "READWRITE", "key": key, "range_end": range_end}
    await ask_gateway(endpoint, "auth/role/grant", {"name": "limited", "perm": permission})
    for name in ("root", *users):
        await ask_gateway(endpoint, "auth/user/add", {"name": name, "password": PASSWORD})
        await ask_gateway(endpoint, "auth/user/grant", {"user": name, "role": "root" if name == "root" else "limited"})
    await ask_gateway(endpoint, "auth/enable", {})


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
