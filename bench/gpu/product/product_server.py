"""Servers that keep running after the stage that starts them, because later stages use them too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.gpu.product.run_state import read_state
from bench.parts.peers.workers.http_engine import free_port
from bench.parts.server_process import serve_command

_LISTENING = re.compile(r"^listening on (\S+:\d+)$", re.MULTILINE)
_METRIC = re.compile(r"^([a-z_:]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_POLL_S = 0.1
_SIGTERM_WAIT_S = 8.0
_SCRAPE_TIMEOUT_S = 10.0
_LOG_END_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class ProductServer:
    """A server process of the run.

    Attributes:
        name: `E` (exact), `F` (fast), or any other name that is unique in the run.
        pid: id of the process, which leads its own process group.
        address: `HOST:PORT` of gRPC; empty while the server is starting.
        metrics_url: URL of its metrics.
        start_time: Unix time in seconds at which the process was started.
    """

    name: str
    pid: int
    address: str
    metrics_url: str
    start_time: float

    @classmethod
    def launch(
        cls,
        name: str,
        model: str,
        settings: Sequence[str],
        *,
        device: str,
        environment: Mapping[str, str] | None = None,
    ) -> ProductServer:
        """Start `radixkv serve` without waiting until it listens. Its output goes to files of the run's folder."""
        metrics_port = free_port()
        command = serve_command(model, device, settings)
        command += ["--log-format", "json", "--metrics-port", str(metrics_port)]
        with _output_file(name).open("wb") as out, _log_file(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return cls(name, process.pid, "", f"http://127.0.0.1:{metrics_port}/metrics", time.time())

    def wait_until_listening(self, timeout_s: float) -> ProductServer:
        """Wait until the server listens. Returns a copy of this object that has the address.

        Raises:
            RuntimeError: the process ended or did not listen in time. The message has the end of its log.
        """
        end_s = time.monotonic() + timeout_s
        out = _output_file(self.name)
        while not (match := _LISTENING.search(out.read_text(encoding="utf-8"))):
            if not _is_running(self.pid):
                raise RuntimeError(f"the server ended before it listened: {self._end_of_log()}")
            if time.monotonic() > end_s:
                raise RuntimeError(f"the server did not listen within {timeout_s:.0f} s: {self._end_of_log()}")
            time.sleep(_POLL_S)
        return ProductServer(self.name, self.pid, match[1], self.metrics_url, self.start_time)

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return _is_running(self.pid)

    def log_lines(self) -> list[tuple[float, str]]:
        """Return the messages in its log so far, each with the seconds since the process was started."""
        lines = []
        for line in _log_file(self.name).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a library's warning is not JSON
                fields = json.loads(line)
                seconds = datetime.fromisoformat(fields["time"]).timestamp() - self.start_time
                lines.append((round(seconds, 2), str(fields["message"])))
        return lines

    def metrics(self) -> dict[str, float]:
        """Scrape the metrics. Returns the value of each series, such as `radixkv_tier_used_bytes{tier="host"}`."""
        with urllib.request.urlopen(self.metrics_url, timeout=_SCRAPE_TIMEOUT_S) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in _METRIC.findall(text)}

    def stop(self) -> None:
        """End the process with SIGTERM. Then SIGKILL ends it if it still runs, and any other process of its group."""
        for signal_number, wait_s in ((signal.SIGTERM, _SIGTERM_WAIT_S), (signal.SIGKILL, _SIGTERM_WAIT_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal_number)
            end_s = time.monotonic() + wait_s
            while _is_running(self.pid) and time.monotonic() < end_s:
                time.sleep(_POLL_S)

    def facts(self) -> dict[str, Any]:
        """Return the attributes as they are stored in the state file of the run."""
        return asdict(self)

    def _end_of_log(self) -> str:
        text = _log_file(self.name).read_text(encoding="utf-8", errors="replace").strip()
        return text[-_LOG_END_CHARACTERS:].replace("\n", " | ")


def running_server(name: str) -> ProductServer:
    """Return a server that the start stage left running.

    Raises:
        RuntimeError: the server is not running.
    """
    server = _servers(Path()).get(name)
    if server is None or not server.is_running:
        raise RuntimeError(f"server {name} is not running")
    return server


def stop_servers(folder: Path) -> None:
    """Stop the servers of the run that has this folder."""
    for server in _servers(folder).values():
        server.stop()


def _servers(folder: Path) -> dict[str, ProductServer]:
    servers = read_state(folder).get("servers", {})
    return {name: ProductServer(**facts) for name, facts in servers.items()}


def _output_file(name: str) -> Path:
    return Path(f"server_{name}.out")


def _log_file(name: str) -> Path:
    return Path(f"server_{name}.log")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")  # zombie, dead
