"""Headless Chromium for tests: opens a page at a width, runs expressions in it, waits for what they say.

Chromium's DevTools protocol carries it, over a web socket on this machine. The page's Content-Security-Policy holds:
expressions of the protocol are not part of the page.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
DEADLINE_S = 600.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


class Chromium:
    """One browser with one tab. A context manager. `complaints` holds exceptions and blocked loads of the page."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._sent = 0

    def __enter__(self) -> Chromium:
        self._profile = tempfile.mkdtemp(prefix="chromium")
        command = ["chromium", *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._loop.run_until_complete(asyncio.wait_for(self._connect(), DEADLINE_S))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        if hasattr(self, "_session"):
            self._loop.run_until_complete(self._session.close())
        self._loop.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _connect(self) -> None:
        port_file = Path(self._profile) / "DevToolsActivePort"
        while not port_file.exists() or "\n" not in port_file.read_text():
            await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"{base}/json") as reply:
            (tab,) = [target for target in await reply.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Runtime", "Log", "Page"):
            await self._call(f"{domain}.enable")

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        number = self._sent
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"])[:500])
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, **parameters), DEADLINE_S))

    def open(self, url: str, width: int = 1400, dark: bool = False) -> None:
        """Opens a page in a window `width` pixels wide."""
        self.complaints.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; a promise's once it is kept."""
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression: str) -> Any:
        """Waits until the expression is true, and returns its value."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            value = self.run(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")
            if value:
                return value
            assert time.monotonic() < deadline, (
                expression,
                self.complaints,
                self.run("document.body.innerText")[:2000],
            )
            time.sleep(0.05)
