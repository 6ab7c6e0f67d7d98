"""Runs an engine that serves HTTP: starts its server, waits until it is ready, and reads streamed events."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


class HttpEngine:
    """A server process that answers `GET /health` when it is ready. It writes its log to stderr.

    Raises:
        RuntimeError: the server ended or did not get ready in time.
    """

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"server: expected an answer to /health, got exit status {self._process.returncode}")
            health = f"http://127.0.0.1:{self._port}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=_TIMEOUT_S):
                return
            time.sleep(0.25)
        raise RuntimeError(f"server: expected an answer to /health, got none within {_TIMEOUT_S:g} s")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON and return the answer's JSON. Raises RuntimeError for another status than 200."""
        with contextlib.closing(self._send(path, body)) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """Send JSON and yield the JSON of each event as it arrives. Raises like `post`."""
        with contextlib.closing(self._send(path, body)) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield json.loads(data)

    def _send(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"server: expected status 200, got {response.status}: {response.read()[:300]!r}")
        return response

    def close(self) -> None:
        """Stop the server and everything it started."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
