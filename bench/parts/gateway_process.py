"""An SMG gateway in front of servers, started for one run and stopped with it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from bench.parts.peers.workers.http_engine import free_port
from bench.parts.server_process import LoggedProcess, end_of_log
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError

_POLL_PERIOD_S = 0.1
_PAGE_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 20.0


class GatewayProcess(LoggedProcess):
    """A gateway subprocess. A `with` statement starts it, returns its URL, `http://HOST:PORT`, and ends it.

    It listens on two free local ports, for requests and for metrics, and routes by cached prefixes. It is ready when
    every server is healthy and the tokenizer of the model is loaded.

    Args:
        servers: addresses of servers with `gateway.enabled`, `HOST:PORT` each.
        start_timeout_s: seconds within which all servers must be healthy, and the tokenizer loaded.

    Attributes:
        metrics_url: its metrics for Prometheus; empty before it is started.
    """

    def __init__(self, servers: Sequence[str], *, start_timeout_s: float = 120.0) -> None:
        super().__init__(_STOP_TIMEOUT_S)
        self.metrics_url = ""
        self._servers = list(servers)
        self._start_timeout_s = start_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="radixkv-gateway-")

    def stop(self) -> int | None:
        """As in `LoggedProcess`."""
        status = super().stop()
        self._folder.cleanup()
        return status

    def _start(self) -> str:
        if importlib.util.find_spec("smg") is None:
            raise ConfigError(missing_package("smg", "gateway"))
        ports: set[int] = set()
        while len(ports) < 2:
            ports.add(free_port())
        port, metrics_port = ports
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "smg", "launch", "--policy", "cache_aware"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
                *("--health-check-interval-secs", "2", "--shutdown-grace-period-secs", "1"),
                *("--worker-startup-check-interval", "1"),
                *("--worker-urls", *(f"grpc://{server}" for server in self._servers)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self._folder.name,  # the model's path does not exist here, so the gateway requests the tokenizer
        )
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + self._start_timeout_s
        while num_healthy_servers(url) < len(self._servers) or not _has_tokenizer(url):
            if self._process.poll() is not None:
                raise ConfigError(self._describe_failure(f"its end, with exit status {self._process.returncode}"))
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    self._describe_failure(f"{num_healthy_servers(url)} within {self._start_timeout_s:g} s")
                )
            time.sleep(_POLL_PERIOD_S)
        return url

    def _describe_failure(self, got: str) -> str:
        return f"gateway: expected {len(self._servers)} healthy servers, got {got}; its log:\n{end_of_log(self._log)}"


def num_healthy_servers(url: str) -> int:
    """Return the number of servers that a gateway sends requests to; 0 while the gateway does not answer."""
    workers = _read_page(url, "/workers").get("workers", [])
    return sum(worker["is_healthy"] and worker["status"] == "ready" for worker in workers)


def _has_tokenizer(url: str) -> bool:
    """Whether the gateway has loaded the tokenizer of its servers' model."""
    return bool(_read_page(url, "/v1/tokenizers").get("tokenizers"))


def _read_page(url: str, path: str) -> dict[str, Any]:
    """Return the JSON of a page of a gateway; empty while the gateway does not answer."""
    try:
        with urllib.request.urlopen(url + path, timeout=_PAGE_TIMEOUT_S) as response:
            page: dict[str, Any] = json.load(response)
            return page
    except OSError:
        return {}
