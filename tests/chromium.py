"""Debian's Chromium without a window, driven over its own DevTools protocol.

The browser is told what to do on a pipe (--remote-debugging-pipe): no port, no driver beside it,
and nothing to install but the browser, which `make setup` does where it can.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

GUARD_S = 120
"""Bound on every wait; nothing is expected to take so long."""
_ANSWER_BYTES_MAX = 64 << 20
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


def path() -> str | None:
    """Returns the browser's path, None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Failed(Exception):
    """The browser refused a command, or a script threw."""


class Browser:
    """A running browser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Has the browser do something; returns its answer. Raises Failed."""
        number = next(self._ids)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(GUARD_S):
            answer = await waiting
        if "error" in answer:
            raise Failed(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                waiting = self._answers.pop(message.get("id", 0), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.take(message["method"], message["params"])

    async def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """Opens an empty page in a profile of its own."""
        context = await self.send("Target.createBrowserContext")
        target = await self.send("Target.createTarget", url="about:blank", **context)
        attached = await self.send("Target.attachToTarget", **target, flatten=True)
        page = Page(self, attached["sessionId"], context["browserContextId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await page.send(f"{domain}.enable")
        await page.size(width, height)
        await page.prefers(dark=dark)
        return page

    async def close_pages(self) -> None:
        """Closes all pages, and forgets their profiles."""
        for page in self._pages.values():
            await self.send("Target.disposeBrowserContext", browserContextId=page.profile)
        self._pages.clear()


class Page:
    """One page."""

    def __init__(self, browser: Browser, session: str, profile: str) -> None:
        self.profile = profile
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        """What the browser complained of: scripts that threw, what a policy forbade, lost files."""
        self.requests: list[dict[str, Any]] = []
        """All that it asked for, with address and headers."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """As Browser.send, for this page."""
        return await self._browser.send(method, self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Takes an event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")

    async def size(self, width: int, height: int) -> None:
        """Gives the page a size in CSS pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefers(self, *, dark: bool = False, reduced_motion: bool = False) -> None:
        """Has the page believe that its user prefers this."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {
                "name": "prefers-reduced-motion",
                "value": "reduce" if reduced_motion else "no-preference",
            },
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        """Goes to an address."""
        answer = await self.send("Page.navigate", url=url)
        if "errorText" in answer:
            raise Failed(f"{url}: {answer['errorText']}")

    async def run(self, script: str) -> Any:
        """Returns what an expression comes to, awaited. Raises Failed if it throws."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Failed(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until an expression is true."""
        try:
            async with asyncio.timeout(GUARD_S):
                while not await self.run(f"!!({script})"):
                    await self.run("new Promise((done) => setTimeout(done, 20))")
        except TimeoutError:
            raise AssertionError(f"not {script}; {self.problems}; {await self.text()}") from None

    async def until_said(self, text: str, selector: str = "body") -> None:
        """Waits until an element shows a text."""
        shown = f"document.querySelector({json.dumps(selector)})?.innerText"
        await self.until(f"{shown}?.includes({json.dumps(text)})")

    async def text(self, selector: str = "body") -> str:
        """Returns the text that is seen of an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def accessible(self) -> list[tuple[str, str]]:
        """Returns role and name of all that a screen reader is told of, in order."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    async def press(self, key: str, code: int) -> None:
        """Presses and lets go a key, by its name and its Windows virtual key code."""
        text = {"Enter": "\r"}.get(key, "")
        named = {"key": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    async def type(self, text: str) -> None:
        """Types into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def picture(self) -> bytes:
        """Returns a PNG of the whole page."""
        size = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    async def hide(self, hidden: bool) -> None:
        """Has the page believe that it is, or is no more, behind another."""
        await self.run(
            "Object.defineProperty(document, 'hidden',"
            f" {{value: {json.dumps(hidden)}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )


@contextlib.asynccontextmanager
async def browser(executable: str) -> AsyncIterator[Browser]:
    """Runs a browser until the block ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # It refuses to run as root otherwise.
        process = await asyncio.create_subprocess_exec(
            # It reads commands from descriptor 3 and answers on 4.
            *("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", executable, *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_ANSWER_BYTES_MAX,
            env={**os.environ, "HOME": profile},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        running = Browser(process.stdout, process.stdin)
        try:
            yield running
        finally:
            with contextlib.suppress(Failed, TimeoutError):
                await running.send("Browser.close")
            try:
                async with asyncio.timeout(GUARD_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
