"""A headless Chromium, controlled over its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.patience import PATIENCE_S

# A program that becomes the browser, with the two pipes at descriptors 3 and 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One tab of a browser that ends with the context.

    Args:
        profile: a new directory for the browser's own files.
    """

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4. The child gets duplicates with
        # numbers from 10, so that moving one end to 3 or 4 does not close the other one.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands_read, answers_write)]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                *map(str, ends),
                BROWSER,
                *options,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands_read, answers_write, *ends):
            os.close(end)
        self._unread = b""
        self._num_calls = 0
        self._session: str | None = None

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._read()
        while answer.get("id") != self._num_calls:  # an event, which has no id
            answer = self._read()
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def show(self, width: int, height: int, scheme: str) -> None:
        """Emulate a window of this size, in CSS pixels, with the preferred color scheme `light` or `dark`."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; if it is a promise, the value that it resolves to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(png))

    def _read(self) -> dict[str, Any]:
        """Wait for the next message of the browser: an answer or an event."""
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            chunk = os.read(self._answers, 1_000_000)
            assert chunk, "the browser has ended"
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
