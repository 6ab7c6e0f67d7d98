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

SMALL = ("--model", "tiny", "--port", "0", "--set", "cache.capacity_tokens=32768", "--set", "server.drain_timeout_s=2")


class FleetProcess:
    """A fleet that runs.

    Attributes:
        address: of its ingress.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def pids(self, name: str = "") -> list[int]:
        """Processes of the fleet that are alive, all or those whose command has a name in it, oldest first."""
        return [pid for pid in sorted(descendants(self._process.pid)) if name in command_of(pid)]

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def running_fleet(*arguments: str, log: Path) -> Iterator[FleetProcess]:
    """Run `radixkv fleet`. Afterwards, none of its processes is left."""
    command = [sys.executable, "-m", "radixkv.service", "fleet", *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        # Names of sockets below it have 107 bytes at most, so it is not in the folder of the log.
        tempfile.TemporaryDirectory(prefix="fleet", ignore_cleanup_errors=True) as environment["RAY_TMPDIR"],
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        seen: set[int] = set()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), (line, log.read_text("utf-8")[-4000:])
            fleet = FleetProcess(process, line.removeprefix("listening on ").strip())
            yield fleet
            seen = descendants(process.pid)
            fleet.terminate()
            assert process.returncode == 0, log.read_text("utf-8")[-4000:]
            wait_until(lambda: not any(is_alive(pid) for pid in seen))
        finally:
            seen |= descendants(process.pid)
            process.kill()
            for pid in seen:
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
    """Addresses beyond loopback on which processes listen, as Linux writes them."""
    return [each for each in listeners(pids) if not each.startswith(("0100007F:", "0000000000000000FFFF00000100007F:"))]
