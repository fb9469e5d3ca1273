"""Every query of the dashboard has data in a real Prometheus, with proxies and brokers under load, some in trouble.

One proxy with two workers is before replicated reference brokers, of which one dies. The other, with TLS, users and
rules, is before scripted brokers: one answers, one refuses, one is down.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy_codec.error_codes import INVALID_RECORD
from tests.support.brokers.reference_broker import start_brokers
from tests.support.claims.own_client import OwnClient
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.etcd.embedded import own_etcd
from tests.support.pages import ROOT
from tests.support.processes.dev import serving
from tests.support.processes.ports import free_port
from tests.support.processes.prometheus import FIRES_WITHIN_S, prometheus
from tests.support.processes.served import ServedBroker, beside, port_of, static_proxy
from tests.support.scene import ANSWERS
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer

# Prometheus is not everywhere.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (a package of Debian)"),
]

DASHBOARD = ROOT / "deploy/helm/kproxy/files/dashboard.json"
RULE = '[[acls]]\nprincipal = "User:alice"\noperations = ["admin"]\ntopics = ["*"]\n'


def queries() -> dict[tuple[str, str], str]:
    """Each query by its panel and legend, for every job and instance, over half a minute."""
    return {
        (panel["title"], target["legendFormat"]): re.sub(
            r"\$(?:job|instance)", ".+", target["expr"].replace("$__rate_interval", "30s")
        )
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    }


async def test_every_query_has_data_under_load(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        etcd, _ = await stack.enter_async_context(own_etcd(tmp_path / "etcd"))
        options = {"admin": 0, "default_replication_factor": 3, "lease_ttl_s": 4}
        brokers = stack.enter_context(start_brokers((1, 2, 3), tmp_path, etcd.endpoint, "/board", **options))
        admin = AdminClient({"bootstrap.servers": ",".join(each.address for each in brokers), "log_level": 0})
        for made in admin.create_topics([NewTopic("t", 6, 3), NewTopic("gated", 1, 3)]).values():
            made.result(60)
        config = tmp_path / "kproxy.toml"
        config.write_text("[metrics]\ntopics = 5\nclients = 5\n")
        arguments = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--workers", "2"]
        arguments += ["--etcd", etcd.endpoint, "--prefix", "/board", "--writer-group=gated=g"]
        sound = stack.enter_context(serving([*arguments, f"--audit-sink=json:{tmp_path}/trail"], tmp_path / "sound"))

        pair = Signer(tmp_path / "authority").issue("listener", "localhost")
        tls = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
        answering = await ServedBroker(1, ANSWERS).start()
        refusing = await ServedBroker(2, lambda asked: asked.answer(results={("t", 1): INVALID_RECORD})).start()
        for broker in (answering, refusing):
            stack.push_async_callback(broker.stop)
        ports = {1: answering.port, 2: refusing.port, 3: free_port()}
        (tmp_path / "b").mkdir()
        proxy = static_proxy(tmp_path / "b", ports, rooms=tls + sasl.plain_users(tmp_path / "b") + RULE)
        troubled = await stack.enter_async_context(beside(proxy))
        trusting = ssl.create_default_context(cafile=str(tmp_path / "authority/ca.pem"))

        async def write(topic: str, *partitions: int) -> None:
            client = await RawClient().connect(port_of(sound))
            client.send(produce_frame({topic: partitions}, acks=1, records=batch(producer_id=-1)))
            await client.answer()
            client.close()

        async def stranger() -> RawClient:
            return await RawClient().connect(port_of(troubled), tls=trusting)

        async def trouble() -> None:
            for partition, fields in ((0, {}), (1, {}), (2, {"timeout_ms": 300}), (2, {"acks": 0})):
                client = await sasl.logged_in(await stranger())
                client.send(produce_frame({"t": [partition]}, **fields))
                await (client.is_closed() if "acks" in fields else client.answer())
                client.abort()
            denied = await sasl.logged_in(await stranger(), "bob")
            denied.send(produce_frame())
            await denied.answer()
            denied.abort()
            guesser = await stranger()
            guesser.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "guess")))
            await guesser.rest()
            untold = await RawClient().connect(port_of(troubled))
            untold.send(produce_frame())
            await untold.rest()
            guesser.abort()
            untold.abort()

        jobs = {"kproxy": [sound.admin, troubled.admin], "brokers": [each.admin for each in brokers]}
        with prometheus(tmp_path / "prometheus", jobs) as monitor:
            claimant = await OwnClient.connect("127.0.0.1", port_of(sound))
            stack.push_async_callback(claimant.close)
            await claimant.own("g", [("gated/0", 1)])
            brokers[2].kill()
            brokers[2].start()
            missing = queries()
            ends_at = time.monotonic() + FIRES_WITHIN_S
            while missing and time.monotonic() < ends_at:
                await asyncio.gather(write("t", *range(6)), write("gated", 0), trouble())
                missing = {
                    each: text for each, text in missing.items() if not await asyncio.to_thread(known, monitor, text)
                }
        assert missing == {}


def known(monitor: Any, expression: str) -> bool:
    """Whether it has a value that is a number."""
    return any(each["value"][1] not in ("NaN", "+Inf") for each in monitor.query(expression))
