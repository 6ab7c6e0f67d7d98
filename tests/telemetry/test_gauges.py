"""A scrape reads gauges from the engine, and waits for a limited time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from radixkv import __version__
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.telemetry.gauges import EngineGauges
from tests.engine.gated_runner import BLOCK_SIZE, ENDLESS_S, NUM_BLOCKS, GatedRunner
from tests.events.fake_source import FakeSource
from tests.fake_runner import tokens
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S, wait_until
from tests.service.fake_engine import FakeEngine


def scrape(engine: Engine, timeout_s: float = PATIENCE_S) -> dict[str, float]:
    """Return values by sample name; label values are appended with a dot."""
    registry = CollectorRegistry()
    registry.register(EngineGauges(engine, timeout_s))
    return {
        ".".join([sample.name, *sample.labels.values()]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name != "radixkv_info"
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the watchdog."""
    clock = FakeClock()
    monkeypatch.setattr("radixkv.engine.watchdog.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("radixkv.engine.watchdog._MAX_PERIOD_S", 0.005)
    return clock


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def engine(runner: GatedRunner, clock: FakeClock) -> Iterator[Engine]:
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE, probation_share=0.1)
    engine = Engine(runner, cache, EngineConfig(max_step_tokens=8, step_timeout_s=30))
    engine.start()
    yield engine
    runner.gate.set()
    engine.stop()


def test_gauges_equal_the_load_of_the_engine(engine: Engine) -> None:
    for start in (0, 50, 100, 150):
        engine.prefill(PrefillParams(tokens(range(start, start + 40)), Caller(str(start)))).result(PATIENCE_S)
    engine.prefill(PrefillParams(tokens(range(150, 180)), Caller("150"), hold_lease=True)).result(PATIENCE_S)
    load = engine.load().result(PATIENCE_S)
    # The four prompts need 40 blocks, 8 more than the pool has. The held lease pins 7 full blocks and owns another.
    assert (load.blocks.pinned, load.held_leases, load.evicted_blocks) == (7, 1, 8 + 1)
    assert load.evicted_probation_blocks == 9
    assert load.blocks.on_probation > 0
    assert scrape(engine) == {
        "radixkv_up": 1,
        "radixkv_healthy": 1,
        "radixkv_attention_info.fake attention": 1,
        "radixkv_recorded_steps.used": 0,
        "radixkv_recorded_steps.dropped": 0,
        "radixkv_sessions": 0,
        "radixkv_prefetched_tokens_total": 0,
        "radixkv_dropped_prefetches_total": 0,
        "radixkv_blocks.free": load.blocks.free,
        "radixkv_blocks.leased": load.blocks.leased,
        "radixkv_blocks.published": load.blocks.published,
        "radixkv_pinned_blocks": load.blocks.pinned,
        "radixkv_retained_blocks": load.blocks.retained,
        "radixkv_probation_blocks": load.blocks.on_probation,
        "radixkv_evicted_blocks_total": load.evicted_blocks,
        "radixkv_evicted_probation_blocks_total": load.evicted_probation_blocks,
        "radixkv_unfinished_requests.waiting": 0,
        "radixkv_unfinished_requests.running": 0,
        "radixkv_unfinished_requests.following": 0,
        "radixkv_paused_requests": 0,
        "radixkv_held_leases": 1,
        "radixkv_namespaces": load.namespaces,
        "radixkv_adapters.loaded": 0,
        "radixkv_adapters.draining": 0,
        "radixkv_adapter_bytes.device": 0,
        "radixkv_adapter_bytes.host": 0,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": (load.blocks.leased + load.blocks.pinned) / NUM_BLOCKS,
        f"vllm:cache_config_info.{BLOCK_SIZE}.{NUM_BLOCKS}": 1,
    }


def test_cached_blocks_do_not_count_as_usage_in_vllms_metric(engine: Engine) -> None:
    for start in range(0, 210, 10):
        engine.prefill(PrefillParams(tokens(range(start, start + 40)))).result(PATIENCE_S)
    scraped = scrape(engine)
    assert scraped["radixkv_evicted_blocks_total"] > 0
    assert scraped["vllm:kv_cache_usage_perc"] == 0


def test_events_and_subscribers_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    monkeypatch.setattr(engine, "events", source)
    source.switch_on()
    source.store(*range(8))  # two blocks of four tokens
    source.store(*range(12))  # a third block after the same two
    source.evict(1)
    source.num_readers, source.num_lost = 5, 7
    values = {name: value for name, value in scrape(engine).items() if name.startswith("radixkv_event_")}
    assert values == {
        "radixkv_event_batches_total": 3,
        "radixkv_event_blocks_total": 4,
        "radixkv_event_readers": 5,
        "radixkv_event_readers_lost_total": 7,
    }


def test_an_adapter_with_two_names_counts_once() -> None:
    engine = FakeEngine()
    engine.adapters.load_now("law", Path("one"))
    engine.adapters.load_now("court", Path("one"))
    engine.adapters._names.acquire("law")
    for name in ("law", "court"):
        engine.adapters.load_now(name, Path("two"))
    values = scrape(engine)
    assert (values["radixkv_adapters.loaded"], values["radixkv_adapters.draining"]) == (1, 1)
    assert (values["radixkv_adapter_bytes.device"], values["radixkv_adapter_bytes.host"]) == (200, 0)


def test_the_info_metric_names_version_model_and_device(engine: Engine) -> None:
    registry = CollectorRegistry()
    registry.register(EngineGauges(engine))
    labels = {"version": __version__, "model": "fake", "device": "cpu"}
    assert registry.get_sample_value("radixkv_info", labels) == 1


def test_a_scrape_during_a_stalled_step_reports_only_that_the_engine_is_down(
    engine: Engine, runner: GatedRunner, clock: FakeClock
) -> None:
    runner.gate.clear()
    future = engine.prefill(PrefillParams(tokens(range(8))))
    assert runner.entered.wait(PATIENCE_S)
    clock.now_s += 31
    wait_until(future.cancelled)
    assert scrape(engine, timeout_s=ENDLESS_S) == {"radixkv_up": 0, "radixkv_healthy": 0}
    runner.gate.set()
    wait_until(lambda: engine.is_healthy)
    assert scrape(engine)["radixkv_up"] == 1


def test_a_scrape_does_not_wait_for_a_stopped_engine(runner: GatedRunner) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig())
    assert scrape(engine, ENDLESS_S) == {"radixkv_up": 0, "radixkv_healthy": 0}
    engine.start()
    assert scrape(engine)["radixkv_up"] == 1
    engine.stop()
    assert scrape(engine, ENDLESS_S) == {"radixkv_up": 0, "radixkv_healthy": 0}


def test_an_engine_that_stops_during_a_scrape_is_down(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.stop()
    monkeypatch.setattr(Engine, "is_alive", True)
    assert scrape(engine)["radixkv_up"] == 0


def test_the_attention_kernels_captured_steps_and_memory_of_the_device_are_reported() -> None:
    samples = [sample for family in EngineGauges(FakeEngine()).collect() for sample in family.samples]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert values["radixkv_attention_info", "warp-specialized attention"] == 1
    assert values["radixkv_recorded_steps", "used"] == 30
    assert values["radixkv_recorded_steps", "dropped"] == 2
    assert values["radixkv_device_memory_bytes", "used"] == 3
    assert values["radixkv_device_memory_bytes", "free"] == 5


def test_blocks_of_sliding_window_layers_are_reported() -> None:
    families = list(EngineGauges(FakeEngine()).collect())
    values = {
        ".".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
        if "part" in sample.name or "shortened" in sample.name
    }
    assert values == {
        "radixkv_parts.free": 7,
        "radixkv_parts.needed": 8,
        "radixkv_parts.kept": 9,
        "radixkv_given_up_parts_total": 10,
        "radixkv_shortened_hits_total": 11,
        "radixkv_part_lost_tokens_total": 12,
    }
