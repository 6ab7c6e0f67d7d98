"""Runs `radixkv fleet` in a separate process, with the processes of Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.fleet.processes import listeners
from bench.parts.peers.process_tree import descendants
from tests.patience import PATIENCE_S, wait_until

SMALL_FLEET = (
    "--model",
    "tiny",
    "--port",
    "0",
    "--set",
    "cache.capacity_tokens=32768",
    "--set",
    "server.drain_timeout_s=2",
)


class FleetProcess:
    """A running fleet.

    Attributes:
        address: address of its ingress.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def pids(self, name: str = "") -> list[int]:
        """Return the living processes of the fleet whose command line contains `name`, by ascending process id."""
        return [pid for pid in sorted(descendants(self._process.pid)) if name in command_of(pid)]

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def running_fleet(*arguments: str, log: Path) -> Iterator[FleetProcess]:
    """Run `radixkv fleet` inside the `with` block, and then end all of its processes."""
    command = [sys.executable, "-m", "radixkv.service", "fleet", *SMALL_FLEET, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        # Ray creates sockets in this directory. Their paths may have 107 bytes; the path of the log is too long.
        tempfile.TemporaryDirectory(prefix="fleet", ignore_cleanup_errors=True) as environment["RAY_TMPDIR"],
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        fleet_pids: set[int] = set()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), (line, log.read_text("utf-8")[-4000:])
            fleet = FleetProcess(process, line.removeprefix("listening on ").strip())
            yield fleet
            fleet_pids = descendants(process.pid)
            fleet.terminate()
            assert process.returncode == 0, log.read_text("utf-8")[-4000:]
            wait_until(lambda: not any(is_alive(pid) for pid in fleet_pids))
        finally:
            fleet_pids |= descendants(process.pid)
            process.kill()
            for pid in fleet_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def listening_elsewhere(pids: list[int]) -> list[str]:
    """Return the addresses other than loopback on which processes listen, in hexadecimal as in /proc/net/tcp."""
    return [each for each in listeners(pids) if not each.startswith(("0100007F:", "0000000000000000FFFF00000100007F:"))]
