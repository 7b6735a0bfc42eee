"""A headless Chromium, driven over the pipe of its DevTools protocol: no port and no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from website.pictures import browser

PATIENCE_S = 30.0
_READ = 1 << 16
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Space": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "/": (191, "/"),
}


class Chromium:
    """One page of a browser.

    Attributes:
        complaints: errors of scripts, and what a page tried to load and could not.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.complaints: list[str] = []
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._loads = 0
        self._rest = b""
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def window(self, width: int, is_dark: bool, height: int = 900) -> None:
        """Set the size of the window in pixels and the colours that the user prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        """Open an address and wait until the page is loaded."""
        self.follow(lambda: self._navigate(address))

    def _navigate(self, address: str) -> None:
        found = self._call("Page.navigate", url=address)
        assert "errorText" not in found, (address, found["errorText"])

    def follow(self, act: Callable[[], Any]) -> None:
        """Do something that opens another page, and wait until it is loaded."""
        before = self._loads
        act()
        self.wait(lambda: self._loads > before, "a page is loaded")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, is_true: Callable[[], Any], what: str) -> None:
        """Wait until the condition holds."""
        end = time.monotonic() + PATIENCE_S
        while not is_true():
            assert time.monotonic() < end, f"waited {PATIENCE_S:g} s until {what}"
            self._call("Runtime.evaluate", expression="0")  # receives events
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, text = _KEYS[key]
        event = {"key": text if text == " " else key, "code": key, "windowsVirtualKeyCode": code}
        self._call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event
        )
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type a text into the focused field."""
        self._call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._event(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._answers], [], [], left)[0], "Chromium does not answer"
            data = os.read(self._answers, _READ)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(str(params["entry"]))


def is_installed() -> bool:
    """Whether this machine has Chromium."""
    return browser() is not None


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """Start Chromium with an empty profile in that folder."""
    program = browser()
    assert program is not None
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    # the protocol's file descriptors are 3 and 4
    shell = f'exec "$@" 3<&{command_end} 4>&{answer_end}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", program, *options, "about:blank"],
        pass_fds=(command_end, answer_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_end)
    os.close(answer_end)
    try:
        yield Chromium(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        shutil.rmtree(profile, ignore_errors=True)
