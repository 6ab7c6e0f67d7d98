"""The names of metrics are stable, because dashboards and alerts depend on them; docs/METRICS.md lists all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from radixkv.api.stats import TierStats
from radixkv.errors import QueueFull, StepFailed
from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks
from radixkv.scheduling.request import Outcome
from radixkv.telemetry.gauges import EngineGauges
from radixkv.telemetry.metrics import MAX_UNKNOWN_TENANTS, Metrics
from tests.events.fake_source import FakeSource
from tests.service.fake_engine import FakeEngine
from tests.telemetry.test_metrics import ended_request

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"

# The type and the labels of each metric, by its name.
NAMES = {
    "radixkv_up": ("gauge", ()),
    "radixkv_adapters": ("gauge", ("state",)),
    "radixkv_adapter_bytes": ("gauge", ("place",)),
    "radixkv_loaded_tokens_total": ("counter", ("tier",)),
    "radixkv_tier_working": ("gauge", ("tier",)),
    "radixkv_tier_used_bytes": ("gauge", ("tier",)),
    "radixkv_tier_capacity_bytes": ("gauge", ("tier",)),
    "radixkv_tier_blocks_total": ("counter", ("outcome", "tier")),
    "radixkv_tier_loaded_bytes_total": ("counter", ("tier",)),
    "radixkv_tier_load_seconds_total": ("counter", ("tier",)),
    "radixkv_rejected_blocks_total": ("counter", ("reason", "source")),
    "radixkv_healthy": ("gauge", ()),
    "radixkv_sessions": ("gauge", ()),
    "radixkv_hints_total": ("counter", ("action", "status")),
    "radixkv_prefetched_tokens_total": ("counter", ()),
    "radixkv_dropped_prefetches_total": ("counter", ()),
    "radixkv_info": ("info", ("device", "model", "version")),
    "radixkv_attention_info": ("info", ("kernels",)),
    "radixkv_recorded_steps": ("gauge", ("state",)),
    "radixkv_device_memory_bytes": ("gauge", ("state",)),
    "radixkv_requests_total": ("counter", ("kind", "outcome")),
    "radixkv_request_failures_total": ("counter", ("error",)),
    "radixkv_request_refusals_total": ("counter", ("error",)),
    "radixkv_refused_calls_total": ("counter", ("reason",)),
    "radixkv_request_pauses_total": ("counter", ()),
    "radixkv_miss_reasons_total": ("counter", ("reason",)),
    "radixkv_request_queue_seconds": ("histogram", ()),
    "radixkv_request_prefill_seconds": ("histogram", ()),
    "radixkv_time_to_first_token_seconds": ("histogram", ()),
    "radixkv_time_per_output_token_seconds": ("histogram", ()),
    "radixkv_request_duration_seconds": ("histogram", ("kind",)),
    "radixkv_prompt_tokens_total": ("counter", ("tenant",)),
    "radixkv_cached_tokens_total": ("counter", ("tenant",)),
    "radixkv_public_tokens_total": ("counter", ("tenant",)),
    "radixkv_computed_tokens_total": ("counter", ("tenant",)),
    "radixkv_generated_tokens_total": ("counter", ("tenant",)),
    "radixkv_recomputed_tokens_total": ("counter", ("tenant",)),
    "radixkv_step_seconds": ("histogram", ()),
    "radixkv_step_requests": ("histogram", ()),
    "radixkv_step_tokens": ("histogram", ("phase",)),
    "radixkv_step_failures_total": ("counter", ()),
    "radixkv_blocks": ("gauge", ("state",)),
    "radixkv_pinned_blocks": ("gauge", ()),
    "radixkv_retained_blocks": ("gauge", ()),
    "radixkv_probation_blocks": ("gauge", ()),
    "radixkv_evicted_blocks_total": ("counter", ()),
    "radixkv_evicted_probation_blocks_total": ("counter", ()),
    "radixkv_unfinished_requests": ("gauge", ("state",)),
    "radixkv_paused_requests": ("gauge", ()),
    "radixkv_held_leases": ("gauge", ()),
    "radixkv_namespaces": ("gauge", ()),
    "radixkv_snapshots": ("gauge", ()),
    "radixkv_max_snapshots": ("gauge", ()),
    "radixkv_given_up_snapshots_total": ("counter", ()),
    "radixkv_state_recomputed_tokens_total": ("counter", ()),
    "radixkv_parts": ("gauge", ("state",)),
    "radixkv_given_up_parts_total": ("counter", ()),
    "radixkv_withheld_blocks": ("gauge", ()),
    "radixkv_shortened_hits_total": ("counter", ()),
    "radixkv_part_lost_tokens_total": ("counter", ()),
    "radixkv_event_batches_total": ("counter", ()),
    "radixkv_event_blocks_total": ("counter", ()),
    "radixkv_event_readers": ("gauge", ()),
    "radixkv_event_readers_lost_total": ("counter", ()),
}
# Metrics of vLLM that schedulers read.
ALIASES = {
    "vllm:num_requests_running": ("gauge", ()),
    "vllm:num_requests_waiting": ("gauge", ()),
    "vllm:kv_cache_usage_perc": ("gauge", ()),
    "vllm:cache_config_info": ("gauge", ("block_size", "num_gpu_blocks")),
}
PROCESS_NAMES = {
    "process_resident_memory_bytes": ("gauge", ()),
    "process_virtual_memory_bytes": ("gauge", ()),
    "process_cpu_seconds_total": ("counter", ()),
    "process_open_fds": ("gauge", ()),
    "process_max_fds": ("gauge", ()),
    "process_start_time_seconds": ("gauge", ()),
}
OUR_NAMES = NAMES | ALIASES
ALL_NAMES = OUR_NAMES | PROCESS_NAMES

# Suffixes of the samples of a histogram.
HISTOGRAM = ("_bucket", "_sum", "_count")
# Suffix of the sample that stands for a metric of each type, after the name of its family.
_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": "", "histogram": "_count"}


def served_registry(*, is_alive: bool = True) -> CollectorRegistry:
    """Return the metrics of a server, with a sample of each.

    With `is_alive` false, its engine does not answer, so that some metrics are missing.
    """
    metrics = Metrics()
    engine = FakeEngine()
    engine.is_alive = is_alive
    engine.events = FakeSource()
    tier = TierStats("host", True, 1, 2, 3, 4, 5, 0.5, 6, 7, 8, 9, 10, 11)
    rejected = RejectedBlocks("tier host")
    rejected.add([ObjectFault.CUT])
    engine.offload = SimpleNamespace(stats=lambda: [tier], tiers={"host": SimpleNamespace(rejected=rejected)})
    metrics.registry.register(EngineGauges(engine))
    metrics.request_refused(QueueFull("full"))
    metrics.request_ended(ended_request(), Outcome.FAILED, StepFailed("broken"), 101.0)
    return metrics.registry


def types_and_labels(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the type and the labels of each metric, by its name."""
    return {
        sample.name.removesuffix("_count"): (family.type, tuple(sorted(sample.labels)))
        for family in registry.collect()
        for sample in family.samples
        if sample.name == family.name + _SUFFIXES[family.type]
    }


def creation_time_of(name: str) -> str:
    """Return the name of the gauge with the creation time of a metric."""
    return f"{name.removesuffix('_total')}_created"


def creation_times_in_a_scrape() -> set[str]:
    """Return the names of all gauges with creation times."""
    return set(re.findall(r"^# TYPE (\w+_created) gauge", generate_latest(served_registry()).decode(), re.MULTILINE))


def listed_below(headings: list[str]) -> set[str]:
    """Return the names of metrics in the tables of some sections of the document."""
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", DOCUMENT.read_text(), re.MULTILINE))
    return {name for each in headings for name in re.findall(r"^\| `([\w:]+)` ", sections[each], re.MULTILINE)}


def sections_of(enumeration: str) -> list[str]:
    """Split an enumeration such as `A, B and C`."""
    return re.split(r", | and ", enumeration)


def test_no_name_changed() -> None:
    assert types_and_labels(served_registry()) == (ALL_NAMES if sys.platform == "linux" else OUR_NAMES)


def test_a_scrape_has_only_the_listed_metrics_and_their_creation_times() -> None:
    families = set(re.findall(r"^# TYPE ([\w:]+)", generate_latest(served_registry()).decode(), re.MULTILINE))
    created = {creation_time_of(name) for name, (kind, _) in NAMES.items() if kind != "gauge"}
    assert families - created <= set(ALL_NAMES)
    assert families & created, "the document describes creation times, but a scrape has none"


@pytest.mark.parametrize("name", OUR_NAMES)
def test_a_scrape_can_select_a_metric_by_name(name: str) -> None:
    kind, _ = OUR_NAMES[name]
    selected = served_registry().restricted_registry([name])
    samples = {sample.name for family in selected.collect() for sample in family.samples}
    assert samples == ({f"{name}{suffix}" for suffix in HISTOGRAM} if kind == "histogram" else {name})


def test_the_document_lists_exactly_the_metrics_of_a_server() -> None:
    rows = re.findall(
        r"^\| `((?:radixkv_|process_|vllm:)\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    documented = {name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows}
    assert documented == ALL_NAMES
    assert len(rows) == len(ALL_NAMES), "the document lists a metric twice"


def test_the_document_says_what_is_missing_while_the_engine_does_not_answer() -> None:
    row = r"^\| `radixkv_up` .*the metrics in the sections (.*) are missing, except `(.*)` \|$"
    ((sections, exception),) = re.findall(row, DOCUMENT.read_text(), re.MULTILINE)
    listed = listed_below(sections_of(sections))
    missing = types_and_labels(served_registry()).keys() - types_and_labels(served_registry(is_alive=False)).keys()
    assert missing == listed - {exception}


def test_the_document_says_which_metrics_have_a_creation_time() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    sentence = r"The counters in the sections (.*?) have no creation time, except `(\w+)`\."
    ((sections, exception),) = re.findall(sentence, text)
    without_creation_time = listed_below(sections_of(sections)) - {exception}
    counters_and_histograms = {name for name, (kind, _) in NAMES.items() if kind in ("counter", "histogram")}
    with_creation_time = counters_and_histograms - without_creation_time
    assert creation_times_in_a_scrape() == {creation_time_of(name) for name in with_creation_time}


def test_the_document_gives_the_maximum_number_of_tenants() -> None:
    assert f"the first {MAX_UNKNOWN_TENANTS} others" in " ".join(DOCUMENT.read_text().split())


def test_the_queries_in_the_document_use_existing_metrics() -> None:
    used = set(re.findall(r"\bradixkv_\w+", DOCUMENT.read_text()))
    series = {f"{name}{suffix}" for name in NAMES for suffix in ("", *HISTOGRAM)}
    assert used <= series | creation_times_in_a_scrape()
