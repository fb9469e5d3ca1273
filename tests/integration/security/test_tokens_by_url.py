"""Clients authenticate with tokens whose keys the proxy fetches from their issuer."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from kproxy_codec.error_codes import NONE
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.processes.served import Served, served
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer
from tests.support.waiting import eventually


async def is_let_in(site: Served, number: int) -> bool:
    client = await site.client()
    answer = await sasl.present(client, sasl.bearer(sasl.token(number)), "OAUTHBEARER")
    client.abort()
    # A refusal is reported in JSON.
    return answer.error_code == NONE and not answer.auth_bytes


async def test_keys_are_fetched_at_start_and_on_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("issuer", "localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.cert, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(signer.ca))
    answers = [web.Response(status=503)]

    is_asked = asyncio.Event()

    async def handle(_: web.Request) -> web.Response:
        is_asked.set()
        text = answers[-1].text if answers[-1].status == 200 else None
        return web.Response(status=answers[-1].status, text=text)

    application = web.Application()
    application.router.add_get("/keys", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    url = f"https://localhost:{runner.addresses[0][1]}/keys"
    rooms = '[sasl]\nmechanisms = ["OAUTHBEARER"]\nwithout_tls = true\n'
    rooms += f'[oauth]\njwks = "{url}"\nissuer = "{sasl.ISSUER}"\naudience = "{sasl.AUDIENCE}"\n'
    try:
        async with served(tmp_path, answers_everything, rooms=rooms) as site:
            assert not await is_let_in(site, 0)
            async with asyncio.timeout(60):
                await is_asked.wait()
            answers.append(web.Response(text=sasl.jwks(0)))
            await eventually(lambda: is_let_in(site, 0))
            # The proxy refreshes after five minutes; an unknown token triggers an earlier refresh.
            answers.append(web.Response(text=sasl.jwks(1)))
            await eventually(lambda: is_let_in(site, 1))
            assert not await is_let_in(site, 0)
            counts = await site.samples()
            for outcome in ("done", "failed"):
                assert counts[("kproxy_token_key_fetches_total", (("outcome", outcome),))] >= 1
    finally:
        await runner.cleanup()
