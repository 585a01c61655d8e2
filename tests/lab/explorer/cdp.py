"""A small client of the DevTools protocol: enough to drive a headless Chromium as a person drives a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0"),
    *(f"--disable-{what}" for what in ("gpu", "background-networking", "component-update", "sync", "dev-shm-usage")),
)


def chromium() -> str | None:
    """Return the browser's program, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser of its own, with a profile of its own, and one page in it."""

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = profile / "DevToolsActivePort"
        wait_for(lambda: port_file.exists() and port_file.read_text().count("\n"), "the browser", 30)
        self.port = int(port_file.read_text().splitlines()[0])
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._run(self._connect())
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    async def _connect(self) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{self.port}/json/list") as response:
            pages = [page for page in await response.json() if page["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, 30))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are remembered."""
        return self._run(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._remember(message)

    def _remember(self, message: dict[str, Any]) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(values["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(values["entry"]["text"] + " " + values["entry"].get("url", ""))

    # --- what a person does --------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")  # a change after "#" alone would not load anything
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 15) -> Any:
        """Wait until an expression is true in the page."""
        return wait_for(
            lambda: self.js(f"(() => {{ try {{ return !!({expression}) }} catch {{}} }})()"), expression, seconds
        )

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Scroll to an element and click its middle."""
        place = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.click_at(*place)

    def click_at(self, x: float, y: float) -> None:
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def key(self, key: str, times: int = 1, shift: bool = False) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "Delete": 46, "Backspace": 8}
        arrows = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        number = {**code, **arrows}[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        for _ in range(times):
            about = {"key": key, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def look(self, width: int, height: int, *, dark: bool = False, still: bool = True) -> None:
        """Set the size of the window, the colour scheme, and whether motion is reduced."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        self._run(self._socket.close())
        self._run(self._session.close())
        self._loop.close()
        self.process.terminate()
        self.process.wait(10)


def wait_for(condition: Any, what: str, seconds: float = 15) -> Any:
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.02)
