"""Browser: a headless Chromium, which opens pages as a reader with a desktop sees them."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import websocket

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
DESKTOP: Final = (1280, 900)  # pixels
_START: Final = 60.0  # seconds
_ANSWER: Final = 60.0


def program() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One window of a headless Chromium, over its DevTools protocol. It ends with the block."""

    def __init__(self, chromium: str) -> None:
        """Raises TimeoutError if it does not start."""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        home = [f"--user-data-dir={self._folder.name}", "--remote-debugging-port=0"]
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        self._process = subprocess.Popen(
            [chromium, *options, *home, *quiet, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._numbers = itertools.count(1)
        try:
            self._socket = websocket.create_connection(self._address(), suppress_origin=True, timeout=_ANSWER)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._end()

    def open(self, url: str) -> None:
        """Open a page in the light colours, in a window as on a desktop, and wait until it is loaded."""
        width, height = DESKTOP
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page. Raises ValueError for an exception."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is true. Raises TimeoutError."""
        until = time.monotonic() + seconds
        while not (found := self.value(expression)):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression} is not true after {seconds:g} s")
            time.sleep(0.1)
        return found

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab or Enter."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def picture(self, height: int | None = None) -> bytes:
        """Return what the window shows as PNG, or the first ``height`` pixels of the page."""
        if height is None:
            return base64.b64decode(self.call("Page.captureScreenshot")["data"])
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol, and return its result. Raises ValueError if it is refused."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise ValueError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _address(self) -> str:
        """Return the address of the window, once Chromium has said its port."""
        told = Path(self._folder.name) / "DevToolsActivePort"
        until = time.monotonic() + _START
        while time.monotonic() < until and self._process.poll() is None:
            lines = told.read_text().splitlines() if told.exists() else []
            if lines:
                with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=_ANSWER) as answer:
                    pages = [each for each in json.load(answer) if each["type"] == "page"]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
            time.sleep(0.1)
        raise TimeoutError("Chromium does not start")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
