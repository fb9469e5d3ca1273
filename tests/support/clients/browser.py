"""Drive a headless Chromium over its devtools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

from tests.support.waiting import PATIENCE_S

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MOST_MESSAGE_BYTES: Final = 64 << 20
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)


class Tab:
    """One page of the browser. `errors` are the errors that its console shows."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._sent = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def open(self) -> Self:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        answer = self._waiting[self._sent] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({**message, "sessionId": self._session} if self._session else message)
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if "error" in said:
                    waiting.set_exception(AssertionError(said["error"]["message"]))
                else:
                    waiting.set_result(said["result"])
            else:
                self._hear(said["method"], said["params"])

    def _hear(self, event: str, about: dict[str, Any]) -> None:
        if event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(str(about["args"]))

    async def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the page, and the reader's choice of colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState == 'complete'")

    async def value(self, expression: str) -> Any:
        """Evaluate JavaScript; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, within_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true, without an error; return its value."""
        tried = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        try:
            async with asyncio.timeout(within_s):
                while not (value := await self.value(tried)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"{expression} has not become true; the page shows {shown!r}") from None
        return value

    async def text(self) -> str:
        """All text that the page shows."""
        return str(await self.value("document.body.innerText"))

    async def press(self, key: str, text: str = "") -> None:
        """Press a key, as `Tab` or `Enter`."""
        codes = {"Tab": 9, "Enter": 13}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def browser(*flags: str) -> AsyncIterator[Tab]:
    """Start a browser with more `flags`, and open a page in it."""
    assert CHROMIUM is not None, "there is no Chromium: install the package `chromium`"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *_FLAGS,
            *flags,
            f"--user-data-dir={profile}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        draining = None
        try:
            address = ""
            async with asyncio.timeout(PATIENCE_S):
                while "DevTools listening on " not in address:
                    address = (await process.stderr.readline()).decode()
            draining = asyncio.create_task(process.stderr.read())
            url = address.partition("DevTools listening on ")[2].strip()
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(url, max_msg_size=MOST_MESSAGE_BYTES) as socket,
            ):
                tab = await Tab(socket).open()
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            if draining is not None:
                await draining
