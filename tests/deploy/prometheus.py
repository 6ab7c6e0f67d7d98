"""Runs a real Prometheus that scrapes a server every second."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.free_port import free_port
from tests.patience import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current result of a query. Raises HTTPError for an invalid query."""
        url = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return result

    def wait_for_result(self, expression: str) -> bool:
        """Repeat a query until it has a result. Return whether it has one within `PATIENCE_S`."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if self.query(expression):
                    return True
            time.sleep(0.2)
        return False

    def rules(self) -> dict[str, str]:
        """Return the health of each alerting rule, by name."""
        with urllib.request.urlopen(f"{self._url}/api/v1/rules", timeout=PATIENCE_S) as response:
            groups = json.load(response)["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


@contextlib.contextmanager
def run_prometheus(folder: Path, target: str, job_settings: dict[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus with docs/deploy/prometheus.yml and alerts.yaml in a directory.

    Args:
        folder: contains the files that the configuration refers to.
        target: `HOST:PORT` of the metrics port, which replaces the one in the file.
        job_settings: replace the keys of the same names in the scrape job.
    """
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    job.update(job_settings)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "alerts.yaml", folder)
    address = f"127.0.0.1:{free_port()}"
    assert PROMETHEUS is not None
    command = [
        PROMETHEUS,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
