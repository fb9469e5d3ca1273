"""The live page's JSON, stream of events and login, of real processes; `test_page_browser` has what one sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from kproxy.observe.live_page import MOST_STREAMS
from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import control_frame, produce_frame
from tests.support.processes.dev import KproxyProcess, run_kproxy
from tests.support.processes.ports import free_port
from tests.support.processes.served import beside, served, static_proxy
from tests.support.waiting import PATIENCE_S

TOKEN: Final = "a-token-of-the-operators"
HTML: Final = {"Accept": "text/html"}


async def asked(process: KproxyProcess, path: str, **query: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"http://{process.admin}{path}", params=query) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def until(process: KproxyProcess, path: str, holds: Any, **query: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not holds(page := await asked(process, path, **query)):
            await asyncio.sleep(0.1)
    return page


@pytest.mark.parametrize("workers", [1, 2])
async def test_pages_tell_what_runs(tmp_path: Path, workers: int) -> None:
    options = {"owners": [1, 2, 1], "more": ["--workers", str(workers)]}
    async with served(tmp_path, answers_everything, answers_everything, **options) as site:
        proxy, client = site.process, await site.client()
        client.send(control_frame(API_VERSIONS, 3, client_software_name="till", client_software_version="7"))
        await client.receive()
        client.send(produce_frame({"t": [0]}))
        assert (await client.answer()).codes == {("t", 0): 0}
        found = await until(proxy, "/clients", lambda page: page["total"] == 1, search="TILL")
        assert [(each["client_id"], each["software"]) for each in found["clients"]] == [("tests", "till 7")]
        assert found["clients"][0]["worker"] in ({1: [None], 2: [1, 2]}[workers])
        assert (await asked(proxy, "/clients", search="nobody"))["total"] == 0
        overview = await until(proxy, "/overview", lambda page: page["rates"]["requests"] > 0)
        assert overview["verdict"] == {"level": "good", "text": "serving, 2 brokers"}
        assert [each["state"] for each in overview["brokers"]] == ["up", "up"]
        assert overview["clients"] == 1
        assert overview["brokers"][0]["partitions"] == 2
        assert (len(overview["workers"]) if workers > 1 else overview["workers"]) in (2, None)
        assert {each["key"] for each in overview["limits"]} >= {"limits.max_connections"}
        top = await asyncio.to_thread(run_kproxy, "top", "--admin", proxy.admin, "--view", "clients")
        assert (top.status, "till 7" in top.stdout) == (0, True)


async def test_partitions_come_by_pages_and_search(tmp_path: Path) -> None:
    topics = "".join(f'[[topics]]\nname = "T{number}"\nowners = [1, 2, 1]\n' for number in range(3))
    async with beside(static_proxy(tmp_path, {1: free_port(), 2: free_port()}, rooms=topics)) as proxy:
        seen, after = [], None
        while True:
            page = await asked(proxy, "/partitions", limit="4", **({"after": after} if after else {}))
            seen += [(each["topic"], each["partition"]) for each in page["partitions"]]
            if (after := page["next"]) is None:
                break
        assert seen == [*((f"T{number}", index) for number in range(3) for index in range(3)), ("t", 0), ("t", 1)]
        page = await asked(proxy, "/partitions", search="t1/", owner="1")
        assert [(each["topic"], each["partition"]) for each in page["partitions"]] == [("T1", 0), ("T1", 2)]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "owner=x", "after=x"])
async def test_wrong_query_is_refused(tmp_path: Path, query: str) -> None:
    async with beside(static_proxy(tmp_path, {1: free_port()})) as proxy, aiohttp.ClientSession() as session:
        async with session.get(f"http://{proxy.admin}/partitions?{query}") as answer:
            assert answer.status == 400
        async with session.get(f"http://{proxy.admin}/clients?skip=1000&limit=1") as answer:
            assert (answer.status, "search" in await answer.text()) == (400, True)


async def test_streams_are_bounded(tmp_path: Path) -> None:
    async with beside(static_proxy(tmp_path, {1: free_port()})) as proxy, aiohttp.ClientSession() as session:
        url = f"http://{proxy.admin}/events"
        streams = [await session.get(url) for _ in range(MOST_STREAMS)]
        try:
            async with session.get(url) as refused:
                assert refused.status == 503
            told = events(streams[-1])
            assert (await anext(told))["at"] < (await anext(told))["at"]
            # Other pages answer meanwhile.
            assert (await asked(proxy, "/overview"))["kind"] == "proxy"
        finally:
            for stream in streams:
                stream.close()
        async with asyncio.timeout(PATIENCE_S):
            while (await session.get(url)).status != 200:
                await asyncio.sleep(0.2)


async def events(stream: aiohttp.ClientResponse) -> Any:
    async for line in stream.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


async def test_streams_end_with_the_proxy(tmp_path: Path) -> None:
    process = static_proxy(tmp_path, {1: free_port()})
    async with aiohttp.ClientSession() as session:
        async with beside(process) as proxy:
            stream = await session.get(f"http://{proxy.admin}/events")
            assert (await anext(events(stream)))["kind"] == "proxy"
        assert b"data: " not in (await stream.content.read()).splitlines()[-1]


class Visit:
    """One browser's requests to a proxy, with its cookies."""

    def __init__(self, proxy: KproxyProcess, session: aiohttp.ClientSession) -> None:
        self.proxy, self.session = proxy, session
        self.url = f"http://{proxy.admin}"

    async def log_in(self, token: str, **headers: str) -> tuple[int, Mapping[str, str]]:
        async with self.session.post(f"{self.url}/login", json={"token": token}, headers=headers) as answer:
            return answer.status, answer.headers

    async def status(self, path: str, headers: Mapping[str, str] | None = None) -> int:
        async with self.session.get(f"{self.url}{path}", headers=headers) as answer:
            return answer.status


@asynccontextmanager
async def visiting(directory: Path, token: str = f'token = "{TOKEN}"', workers: int = 1) -> AsyncIterator[Visit]:
    """A proxy whose page has a token, and a browser."""
    more = ["--workers", str(workers)]
    process = static_proxy(directory, {1: free_port()}, rooms=f"[admin]\n{token}\n", more=more)
    jar = aiohttp.CookieJar(unsafe=True)
    async with beside(process) as proxy, aiohttp.ClientSession(cookie_jar=jar) as session:
        yield Visit(proxy, session)


@pytest.mark.parametrize("workers", [1, 2])
async def test_browser_logs_in_with_token(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with visiting(tmp_path, f'token_file = "{file}"', workers) as visit:
        assert [await visit.status(path) for path in ("/", "/overview", "/events", "/clients")] == [401] * 4
        # What a browser needs to log in, which tells nothing.
        assert [await visit.status(path, HTML) for path in ("/", "/web/page.js", "/login")] == [200] * 3
        assert await visit.status("/overview", HTML) == 401
        assert (await visit.log_in("a-token-of-others"))[0] == 401
        assert (await visit.log_in(TOKEN, Origin="http://evil.test"))[0] == 403
        assert await visit.status("/overview") == 401
        status, headers = await visit.log_in(TOKEN)
        assert status == 204
        cookie = headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert TOKEN not in cookie
        assert await visit.status("/overview") == 200
        evil = {"Origin": "http://evil.test"}
        async with visit.session.post(f"{visit.url}/own/free", json={"group": "g"}, headers=evil) as answer:
            assert answer.status == 403
        # With another token all sessions end.
        file.write_text("another-token-of-operators")
        visit.proxy.signal(1)
        async with asyncio.timeout(PATIENCE_S):
            while await visit.status("/overview") == 200:
                await asyncio.sleep(0.1)
    assert TOKEN not in visit.proxy.stderr()


async def test_logout_ends_the_session(tmp_path: Path) -> None:
    async with visiting(tmp_path) as visit:
        await visit.log_in(TOKEN)
        kept = {each.key: each.value for each in visit.session.cookie_jar}
        async with visit.session.post(f"{visit.url}/logout") as answer:
            assert answer.status == 204
        async with aiohttp.ClientSession(cookies=kept) as session, session.get(f"{visit.url}/table") as answer:
            assert answer.status == 401


async def test_denied_and_refused_are_told(tmp_path: Path) -> None:
    async with visiting(tmp_path) as visit:
        for _ in range(3):
            assert (await visit.log_in("a-token-of-others"))[0] == 401
        await visit.log_in(TOKEN)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with visit.session.get(f"{visit.url}/overview") as answer:
                    told = [each for each in (await answer.json())["events"] if each["kind"] == "denial"]
                if told and told[0]["count"] == 3:
                    break
                await asyncio.sleep(0.2)
        assert "/login" in told[0]["text"]
