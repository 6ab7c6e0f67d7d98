"""The Prometheus metrics of `radixkv serve` after a few calls with known counts."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from radixkv import __version__
from radixkv.service.client import Client
from tests.patience import PATIENCE_S


@contextmanager
def serving_metrics(log: Path, *arguments: str) -> Iterator[tuple[str, str]]:
    """Run `radixkv serve`; yield its address and the URL of its metrics."""
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0", "--metrics-port", "0", *arguments]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"metrics on (http://127\.0\.0\.1:[1-9]\d*/metrics)$", log.read_text(), re.MULTILINE)
            assert url is not None, log.read_text()
            yield line.removeprefix("listening on ").strip(), url[1]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            assert process.stdout is not None
            assert process.stdout.read() == "", "stdout has one line, which was read above"


def scrape(url: str) -> dict[str, float]:
    """Return all values by name and labels, such as `blocks{state=free}`; names are without the prefix `radixkv_`."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {series_of(sample): sample.value for family in families for sample in family.samples}


def series_of(sample: Sample) -> str:
    """Return a name and labels, such as `blocks{state=free}`."""
    labels = ",".join(f"{name}={text}" for name, text in sorted(sample.labels.items()))
    return sample.name.removeprefix("radixkv_") + (f"{{{labels}}}" if labels else "")


def make_calls(client: Client) -> None:
    """Make two prefills, a generation, and a call that is refused."""
    assert client.prefill(range(200), tenant="acme").usage.computed_tokens == 200
    assert client.prefill(range(200), tenant="acme").usage.cached_tokens == 199
    chunks = list(client.generate(range(150), max_new_tokens=5, ignore_eos=True, tenant="b"))
    assert chunks[-1].usage.generated_tokens == 5
    with pytest.raises(grpc.RpcError):
        client.prefill([1, 512])


# After `make_calls`. Each prefill takes one step, and the generation five.
EXPECTED_VALUES = {
    "requests_total{kind=prefill,outcome=finished}": 2,
    "requests_total{kind=prefill,outcome=failed}": 0,
    "requests_total{kind=generate,outcome=finished}": 1,
    "request_refusals_total{error=InvalidRequest}": 1,
    "request_pauses_total": 0,
    "miss_reasons_total{reason=cold}": 2,
    "miss_reasons_total{reason=none}": 1,
    "prompt_tokens_total{tenant=acme}": 400,
    "cached_tokens_total{tenant=acme}": 199,
    "public_tokens_total{tenant=acme}": 0,
    "computed_tokens_total{tenant=acme}": 201,
    "generated_tokens_total{tenant=acme}": 0,
    "prompt_tokens_total{tenant=b}": 150,
    "computed_tokens_total{tenant=b}": 150,
    "generated_tokens_total{tenant=b}": 5,
    "recomputed_tokens_total{tenant=b}": 0,
    "request_queue_seconds_count": 3,
    "request_prefill_seconds_count": 3,
    "time_to_first_token_seconds_count": 3,
    "time_per_output_token_seconds_count": 1,
    "request_duration_seconds_count{kind=prefill}": 2,
    "request_duration_seconds_count{kind=generate}": 1,
    "step_seconds_count": 7,
    "step_requests_sum": 7,
    "step_tokens_sum{phase=prefill}": 351,
    "step_tokens_sum{phase=decode}": 4,
    "step_tokens_bucket{le=0.0,phase=prefill}": 4,
    "step_failures_total": 0,
    "up": 1,
    "healthy": 1,
    "blocks{state=free}": 2041,
    "blocks{state=leased}": 0,
    "blocks{state=published}": 7,
    "pinned_blocks": 0,
    "retained_blocks": 0,
    "probation_blocks": 3,
    "evicted_blocks_total": 0,
    "evicted_probation_blocks_total": 0,
    "unfinished_requests{state=running}": 0,
    "held_leases": 0,
    "namespaces": 2,
    f"info{{device=cpu,model=tiny,version={__version__}}}": 1,
}


def test_the_metrics_of_a_few_calls_are_exact(tmp_path: Path) -> None:
    with serving_metrics(tmp_path / "log") as (address, url), Client(address, timeout_s=PATIENCE_S) as client:
        make_calls(client)
        samples = scrape(url)
        stats = client.stats()
    assert {name: samples.get(name) for name in EXPECTED_VALUES} == EXPECTED_VALUES
    assert "tenant=other" in " ".join(samples)
    assert (stats.blocks.free, stats.blocks.published) == (2041, 7), "the Stats call reports the same numbers"
    queue, prefill = samples["request_queue_seconds_sum"], samples["request_prefill_seconds_sum"]
    assert samples["time_to_first_token_seconds_sum"] == pytest.approx(queue + prefill)
    durations = [samples[f"request_duration_seconds_sum{{kind={kind}}}"] for kind in ("prefill", "generate")]
    assert 0 < samples["step_seconds_sum"] < sum(durations)
    assert 0 < samples["time_per_output_token_seconds_sum"] < durations[1] / 4
    assert samples["process_cpu_seconds_total"] > 0
