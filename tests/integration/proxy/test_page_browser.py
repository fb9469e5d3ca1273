"""The live page in a real browser, before a real `kproxy dev` with load: views, sizes, colours, keys, a broker's death.

One cluster and one browser for the whole file. No test may leave an error on the browser's console.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import confluent_kafka
import pytest
import pytest_asyncio

from tests.support.brokers.reference_broker import start_broker
from tests.support.clients.browser import CHROMIUM, Tab, browser
from tests.support.processes.dev import KproxyProcess, dev_arguments, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import beside, static_proxy
from tests.support.security.tls_files import Signer, pin_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Chromium is not everywhere.
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian's package `chromium`)"),
]
VIEWS: Final = ("overview", "topics", "partitions", "clients", "claims", "lately")
TOPIC: Final = "orders"
TOKEN: Final = "a-token-of-the-operators"
SHOWN: Final = "document.querySelectorAll('#panels section').length > 0"
ROWS: Final = "document.querySelectorAll('#panels td[data-label]').length > 0"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    directory = tmp_path_factory.mktemp("page")
    with serving(dev_arguments(directory / "data", "--lease-ttl", "2"), directory / "stderr") as process:
        ends = threading.Event()
        load = threading.Thread(target=_write, args=(process.kafka, ends))
        load.start()
        try:
            yield process
        finally:
            ends.set()
            load.join()


def _write(kafka: str, ends: threading.Event) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka, "client.id": "till-7", "linger.ms": 50})
    while not ends.wait(0.2):
        producer.produce(TOPIC, b"v")
        producer.poll(0)
    producer.flush(10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window() -> AsyncIterator[Tab]:
    async with browser() as tab:
        yield tab


@pytest_asyncio.fixture(loop_scope="module")
async def tab(window: Tab) -> AsyncIterator[Tab]:
    """The browser's page, empty and as wide as a desk's; its console must stay empty."""
    window.errors.clear()
    await window.goto("about:blank")
    await window.look(1280)
    yield window
    assert window.errors == []


async def show(tab: Tab, admin: str, view: str, wanted: str = SHOWN) -> None:
    await tab.goto("about:blank")
    await tab.goto(f"http://{admin}/#{view}")
    await tab.until(wanted)


async def test_each_view_shows_what_runs(cluster: KproxyProcess, tab: Tab) -> None:
    await show(tab, cluster.admin, "overview")
    await tab.until("document.querySelector('h1').innerText.startsWith('serving, 3 brokers, table ')")
    await tab.until("document.querySelectorAll('section[aria-label=Brokers] .tag.good').length == 3")
    text = await tab.text()
    for words in ("limits.max_connections", "Proxies that clients see", "kproxy top --admin", "partitions owned"):
        assert words in text
    await show(tab, cluster.admin, "clients", "document.body.innerText.includes('till-7')")
    assert "rdkafka" in await tab.text()
    await show(tab, cluster.admin, "topics", f"document.body.innerText.includes('{TOPIC}')")
    await tab.until("document.querySelector('td[data-label=\"received/s\"]').innerText.endsWith('B')")
    assert await tab.value("document.querySelector('.hint').hidden")
    await show(tab, cluster.admin, "partitions", ROWS)
    await tab.value("document.querySelector('input[type=search]').focus()")
    await tab.type(f"{TOPIC}/")
    await tab.until(
        f"[...document.querySelectorAll('td[data-label=topic]')].every((each) => each.innerText == '{TOPIC}')"
    )
    await show(tab, cluster.admin, "claims", "document.body.innerText.includes('Nobody has a claim.')")
    await show(tab, cluster.admin, "lately")
    assert "kproxy top --view lately" in await tab.text()


async def test_page_is_live_without_reload(cluster: KproxyProcess, tab: Tab) -> None:
    await show(tab, cluster.admin, "overview")
    topic, before = f"new-{uuid.uuid4().hex[:8]}", await tab.value("state.overview.partitions")
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka})
    producer.produce(topic, b"v")
    assert await asyncio.to_thread(producer.flush, 30) == 0
    await tab.until(f"state.overview.partitions > {before}")
    await tab.until("document.querySelector('#numbers').innerText.includes(String(state.overview.partitions))")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
async def test_views_fit_any_width(cluster: KproxyProcess, tab: Tab, width: int, dark: bool) -> None:
    await tab.look(width, dark=dark)
    for view in VIEWS:
        await show(tab, cluster.admin, view, SHOWN if view in ("claims", "lately") else ROWS)
        assert await tab.value("document.documentElement.scrollWidth") <= width
    paper = await tab.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


async def test_keyboard_reaches_all(cluster: KproxyProcess, tab: Tab) -> None:
    await show(tab, cluster.admin, "overview")
    focused = "document.activeElement.innerText || document.activeElement.placeholder || ''"
    for wanted in ("Overview", "Topics", "Partitions"):
        await tab.press("Tab")
        assert await tab.value(focused) == wanted
    await tab.press("Enter", "\r")
    await tab.until("location.hash == '#partitions' && document.querySelector('input[type=search]') !== null")
    reached = []
    for _ in range(12):
        await tab.press("Tab")
        reached.append(await tab.value(focused))
    assert "topic or topic/partition" in reached
    # The focus shows.
    assert await tab.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    # It stays while the page is updated.
    await tab.value("document.querySelector('input[type=search]').focus()")
    await tab.type("ord")
    heard = await tab.value("state.heard")
    await tab.until(f"state.heard > {heard} + 2000")
    assert await tab.value("document.activeElement.value") == "ord"


async def test_login_opens_the_page(tmp_path: Path, tab: Tab) -> None:
    rooms = f'[admin]\ntoken = "{TOKEN}"\n'
    async with beside(static_proxy(tmp_path, {1: free_port()}, rooms=rooms)) as proxy:
        await tab.goto(f"http://{proxy.admin}/")
        await tab.until("document.activeElement.id == 'token'")
        await tab.type("a-token-of-others")
        await tab.press("Enter", "\r")
        await tab.until("document.body.innerText.includes('this is not the token')")
        # The browser itself reports the status on its console.
        assert [each for each in tab.errors if "401" not in each] == []
        tab.errors.clear()
        await tab.type(TOKEN)
        await tab.press("Enter", "\r")
        await tab.until(SHOWN)
        assert await tab.value("document.cookie") == ""
        assert TOKEN not in await tab.value("location.href")
        await tab.value("document.querySelector('#logout').click()")
        await tab.until("!document.querySelector('#login').hidden")


async def test_page_opens_over_tls(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ours")
    pair = signer.issue("page", "127.0.0.1")
    rooms = f'[admin]\ntoken = "{TOKEN}"\ntls.cert = "{pair.cert}"\ntls.key = "{pair.key}"\n'
    process = static_proxy(tmp_path, {1: free_port()}, rooms=rooms)
    async with beside(process) as proxy:
        # It trusts this key alone, as a browser does that knows the authority.
        async with browser(f"--ignore-certificate-errors-spki-list={pin_of(pair)}") as tab:
            await tab.look(1280)
            await tab.goto(f"https://{proxy.admin}/")
            await tab.until("document.activeElement.id == 'token'")
            await tab.type(TOKEN)
            await tab.press("Enter", "\r")
            await tab.until(SHOWN)
            heard = await tab.value("state.heard")
            await tab.until(f"state.heard > {heard} + 1500 && state.source.readyState == EventSource.OPEN")
            assert f"kproxy top --admin https://{proxy.admin}" in await tab.text()
            await tab.goto(f"https://{proxy.admin}/#topics")
            await tab.until("document.querySelector('.hint').innerText.includes('kproxy serve --metrics-topics 100')")
            assert tab.errors == []
            cookies = (await tab.call("Network.getCookies"))["cookies"]
            assert [(each["httpOnly"], each["secure"], each["sameSite"]) for each in cookies] == [
                (True, True, "Strict")
            ]
        async with browser() as stranger:
            # A browser that does not know the authority shows nothing of the page.
            await stranger.goto(f"https://{proxy.admin}/")
            assert "CERT_AUTHORITY_INVALID" in await stranger.text()


async def test_page_of_workers_names_each(tmp_path: Path, tab: Tab) -> None:
    process = static_proxy(tmp_path, {1: free_port()}, more=["--workers", "2"])
    async with beside(process) as proxy:
        await show(
            tab,
            proxy.admin,
            "overview",
            "document.querySelectorAll('section[aria-label=Workers] tbody tr').length == 2",
        )
        await tab.until("document.querySelector('h1').innerText == 'no broker answers: 1 asked'")
        await tab.until(
            "document.querySelector('.timeline').innerText.includes('connection errors: refused (broker 1)')"
        )


async def test_broker_has_the_same_page(cluster: KproxyProcess, tmp_path: Path, tab: Tab) -> None:
    port = free_port()
    with start_broker(1, tmp_path, cluster.etcd, "/another", admin=port):
        await show(tab, f"127.0.0.1:{port}", "overview")
        assert (await tab.value("document.querySelector('h1').innerText")).startswith("serving, leads 0 of 0 replicas")
        assert await tab.value("[...document.querySelectorAll('.tab')].map((each) => each.innerText).join()") == (
            "Overview,Partitions,Lately"
        )
        # Its stream must end before the broker does.
        await tab.goto("about:blank")


async def test_dying_broker_is_seen(cluster: KproxyProcess, tab: Tab) -> None:
    """It comes last, as it kills a broker of the cluster."""
    await show(tab, cluster.admin, "overview")
    broker = next(each for each in cluster.descendants() if "--node-id" in each.cmdline())
    number = broker.cmdline()[broker.cmdline().index("--node-id") + 1]
    broker.send_signal(signal.SIGKILL)
    await tab.until("document.querySelector('#verdict').className.includes('warn')")
    shown = (
        f"[...document.querySelectorAll('.timeline li')].some((each) => each.innerText.includes('broker {number} at '))"
    )
    await tab.until(shown)
    await tab.until("document.querySelector('.timeline').innerText.includes('partitions moved')")
    # `kproxy dev` restarts it.
    await tab.until("document.querySelector('#verdict').className.includes('good')")
    cluster.signal(signal.SIGTERM)
    # The end of the process is the one error that a console has to show.
    await tab.until("document.querySelector('h1').innerText == 'no answer from this process'")
    assert all("ERR_CONNECTION_REFUSED" in each or "ERR_" in each for each in tab.errors)
    tab.errors.clear()
    await tab.goto("about:blank")
    tab.errors.clear()
