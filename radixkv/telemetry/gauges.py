"""Prometheus metrics of the current state, read from the engine at each scrape."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv import __version__
from radixkv.api.stats import BlockStats, EngineLoad, PartStats, RequestStats, StateStats, TierStats
from radixkv.errors import LifecycleError, QueueFull

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

# Half of the default scrape timeout of Prometheus, 10 s. The engine answers between two steps.
_TIMEOUT_S = 5.0
# What happened to blocks of a tier, by the fields `{outcome}_blocks` of `TierStats`.
_OUTCOMES = ("loaded", "missed", "computed", "saved", "refused", "dropped", "evicted", "touched", "rewritten")
# All numbers are 0; for `describe`, which lists metrics without asking the engine.
_EMPTY_LOAD = EngineLoad(BlockStats(*8 * [0]), RequestStats(*8 * [0]), 0, 0, 0, 0, StateStats(), PartStats())


class EngineGauges(Collector):
    """Collects the state of the engine at each scrape.

    While a step stalls, or after the engine has stopped, `radixkv_up` is 0, and of the other metrics of this collector
    only `radixkv_info`, `radixkv_healthy` and those of events are reported.

    Args:
        engine: reports its load between two steps.
        timeout_s: seconds to wait for that report.
    """

    def __init__(self, engine: Engine, timeout_s: float = _TIMEOUT_S) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    def describe(self) -> Iterable[Metric]:
        """List all metrics without waiting for the engine, so that a scrape can select some of them by name."""
        return [
            *self._health(is_up=False),
            *self._events(),
            *self._device(),
            *self._adapters(),
            *self._agents(),
            *_tiers([]),
            self._rejected(),
            *_families(_EMPTY_LOAD),
            *self._aliases(_EMPTY_LOAD),
        ]

    def collect(self) -> Iterable[Metric]:
        """Collect all metrics, or only the few that the class names if the engine does not answer. Never raises."""
        load = self._load()
        yield from self._health(is_up=load is not None)
        yield from self._events()
        if load is not None:
            yield from self._device()
            yield from self._adapters()
            yield from self._agents()
            yield from _tiers([] if self._engine.offload is None else self._engine.offload.stats())
            yield self._rejected()
            yield from _families(load)
            yield from self._aliases(load)

    def _rejected(self) -> Metric:
        family = CounterMetricFamily(
            "radixkv_rejected_blocks",
            "Blocks from tiers and other servers that failed verification and were not used.",
            labels=["source", "reason"],
        )
        offload, transfer = self._engine.offload, self._engine.transfer
        sources = {} if offload is None else {name: tier.rejected for name, tier in offload.tiers.items()}
        if transfer is not None:
            sources["kv_source"] = transfer.rejected
        for source, rejected in sources.items():
            for reason, number in rejected.counts().items():
                family.add_metric([source, reason.value], number)
        return family

    def _health(self, *, is_up: bool) -> Iterable[Metric]:
        limits = self._engine.limits
        labels = {"version": __version__, "model": limits.model, "device": limits.device}
        yield InfoMetricFamily("radixkv", "The running server, its model and its device.", labels)
        yield GaugeMetricFamily("radixkv_up", "1 if the engine answered this scrape.", is_up)
        yield GaugeMetricFamily(
            "radixkv_healthy", "1 if new requests are accepted and steps succeed.", self._engine.is_healthy
        )

    def _device(self) -> Iterable[Metric]:
        """Report how the device computes, and its memory. Any thread may ask."""
        stats = self._engine.device_stats()
        yield InfoMetricFamily("radixkv_attention", "The attention kernels that serve.", {"kernels": stats.attention})
        states = {"used": stats.captured_steps, "dropped": stats.dropped_steps}
        yield _by_label("radixkv_recorded_steps", "Steps captured as CUDA graphs, by state.", "state", states)
        if stats.total_bytes is not None and stats.used_bytes is not None:
            memory = {"used": stats.used_bytes, "free": stats.total_bytes - stats.used_bytes}
            yield _by_label("radixkv_device_memory_bytes", "Memory of the device in bytes, by state.", "state", memory)

    def _events(self) -> Iterable[Metric]:
        """Report the event log, if there is one. Any thread may read it."""
        if (source := self._engine.events) is not None:
            log = source.log
            yield CounterMetricFamily("radixkv_event_batches", "Batches of cache events.", log.num_batches)
            yield CounterMetricFamily("radixkv_event_blocks", "Event blocks stored or removed.", log.num_blocks)
            yield GaugeMetricFamily(
                "radixkv_event_readers", "Clients that are subscribed to cache events over gRPC.", source.num_readers
            )
            yield CounterMetricFamily(
                "radixkv_event_readers_lost",
                "Subscriptions that ended because the client fell too far behind.",
                source.num_lost,
            )

    def _adapters(self) -> Iterable[Metric]:
        """Report the adapters. Any thread may read them."""
        adapters = {each.digest: each for each in self._engine.adapters.loaded()}.values()
        places = {True: "device", False: "host"}
        num_bytes = dict.fromkeys(places.values(), 0)
        for each in adapters:
            num_bytes[places[each.is_on_device]] += each.num_bytes
        num_draining = sum(each.is_draining for each in adapters)
        states = {"loaded": len(adapters) - num_draining, "draining": num_draining}
        yield _by_label("radixkv_adapters", "Different LoRA adapters, by state.", "state", states)
        yield _by_label(
            "radixkv_adapter_bytes", "Bytes of adapter weights: on the device, or only on the host.", "place", num_bytes
        )

    def _agents(self) -> Iterable[Metric]:
        """Report sessions, hints and prefetches. Any thread may read them."""
        stats = self._engine.agent_stats()
        yield GaugeMetricFamily(
            "radixkv_sessions",
            "Sessions with a running request, with blocks of their own, or with a prompt to prefetch.",
            stats.sessions,
        )
        hints = CounterMetricFamily("radixkv_hints", "Actions of hints.", labels=["action", "status"])
        for labels, number in sorted(stats.hints.items()):
            hints.add_metric(labels, number)
        yield hints
        yield CounterMetricFamily(
            "radixkv_prefetched_tokens", "Tokens loaded before a request needed them.", stats.prefetched_tokens
        )
        yield CounterMetricFamily(
            "radixkv_dropped_prefetches", "Prefetches that loaded nothing.", stats.dropped_prefetches
        )

    def _aliases(self, load: EngineLoad) -> Iterable[Metric]:
        """Report the metrics of vLLM that schedulers read. Blocks that can be evicted do not count as usage."""
        blocks, requests = load.blocks, load.requests
        num_waiting = requests.waiting + requests.following
        usage = blocks.in_use / blocks.total if blocks.total else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests that hold blocks.", requests.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that are waiting.", num_waiting)
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Fraction of the blocks that cannot be evicted, 0 to 1.", usage
        )
        cache_config = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the block pool.", labels=["block_size", "num_gpu_blocks"]
        )
        cache_config.add_metric([str(self._engine.limits.block_size), str(blocks.total)], 1)
        yield cache_config

    def _load(self) -> EngineLoad | None:
        if not self._engine.is_alive:
            return None
        try:
            future = self._engine.load()
        except (LifecycleError, QueueFull):  # the engine has just stopped, or too many calls are waiting
            return None
        try:
            return future.result(self._timeout_s)
        except (TimeoutError, CancelledError, LifecycleError):
            future.cancel()
            return None


def _families(load: EngineLoad) -> Iterable[Metric]:
    blocks, requests = load.blocks, load.requests
    yield _by_label(
        "radixkv_blocks",
        "Blocks of the pool, by state.",
        "state",
        {"free": blocks.free, "leased": blocks.leased, "published": blocks.published},
    )
    yield GaugeMetricFamily("radixkv_pinned_blocks", "Published blocks that are used by leases.", blocks.pinned)
    yield GaugeMetricFamily(
        "radixkv_retained_blocks", "Published blocks with a retention priority above the default.", blocks.retained
    )
    yield GaugeMetricFamily(
        "radixkv_probation_blocks", "Published blocks of prompts that were used only once.", blocks.on_probation
    )
    yield CounterMetricFamily("radixkv_evicted_blocks", "Evicted blocks.", load.evicted_blocks)
    yield CounterMetricFamily(
        "radixkv_evicted_probation_blocks", "Evicted blocks that were on probation.", load.evicted_probation_blocks
    )
    yield _by_label(
        "radixkv_unfinished_requests",
        "Unfinished requests, by state.",
        "state",
        {"waiting": requests.waiting, "running": requests.running, "following": requests.following},
    )
    yield GaugeMetricFamily(
        "radixkv_paused_requests", "Preempted requests that are waiting to be resumed.", requests.paused
    )
    yield GaugeMetricFamily("radixkv_held_leases", "Leases that are held after their request ended.", load.held_leases)
    yield GaugeMetricFamily(
        "radixkv_namespaces",
        "Radix trees: one per namespace, and one per public prefix above it.",
        load.namespaces,
    )
    if (states := load.states) is not None:
        yield GaugeMetricFamily("radixkv_snapshots", "State snapshots in memory.", states.snapshots)
        yield GaugeMetricFamily("radixkv_max_snapshots", "Maximum number of state snapshots.", states.max_snapshots)
        yield CounterMetricFamily(
            "radixkv_given_up_snapshots", "State snapshots that were evicted.", states.given_up_snapshots
        )
        yield CounterMetricFamily(
            "radixkv_state_recomputed_tokens",
            "Cached tokens that were computed again because the state snapshot was missing.",
            states.recomputed_tokens,
        )
    if (parts := load.parts) is not None:
        yield from _parts(parts)
        yield GaugeMetricFamily(
            "radixkv_withheld_blocks", "Blocks whose memory sliding-window layers use.", blocks.withheld
        )


def _parts(parts: PartStats) -> Iterable[Metric]:
    counts = {"free": parts.free, "needed": parts.needed, "kept": parts.kept}
    yield _by_label("radixkv_parts", "Blocks of sliding-window layers, by state.", "state", counts)
    yield CounterMetricFamily(
        "radixkv_given_up_parts", "Cached blocks of sliding-window layers that were evicted.", parts.given_up
    )
    yield CounterMetricFamily(
        "radixkv_shortened_hits",
        "Cache hits that were shortened because blocks of sliding-window layers were missing.",
        parts.shortened_hits,
    )
    yield CounterMetricFamily(
        "radixkv_part_lost_tokens", "Cached tokens that shortened hits could not reuse.", parts.lost_tokens
    )


def _tiers(tiers: Iterable[TierStats]) -> Iterable[Metric]:
    tiers = list(tiers)
    working = {each.tier: int(each.is_working) for each in tiers}
    yield _by_label(
        "radixkv_tier_working", "1 if the tier is in use, 0 if it is disabled after failures.", "tier", working
    )
    used_bytes = {each.tier: each.used_bytes for each in tiers if each.used_bytes is not None}
    yield _by_label("radixkv_tier_used_bytes", "Bytes of blocks in the tier.", "tier", used_bytes)
    capacity_bytes = {each.tier: each.capacity_bytes for each in tiers if each.capacity_bytes is not None}
    yield _by_label("radixkv_tier_capacity_bytes", "Capacity of the tier in bytes.", "tier", capacity_bytes)
    outcomes = CounterMetricFamily("radixkv_tier_blocks", "Blocks of the tier, by outcome.", labels=["tier", "outcome"])
    for each in tiers:
        for outcome in _OUTCOMES:
            outcomes.add_metric([each.tier, outcome], getattr(each, f"{outcome}_blocks"))
    yield outcomes
    loaded = CounterMetricFamily("radixkv_tier_loaded_bytes", "Bytes of K/V loaded from the tier.", labels=["tier"])
    for each in tiers:
        loaded.add_metric([each.tier], each.loaded_bytes)
    yield loaded
    seconds = CounterMetricFamily("radixkv_tier_load_seconds", "Time spent loading from the tier.", labels=["tier"])
    for each in tiers:
        seconds.add_metric([each.tier], each.load_s)
    yield seconds


def _by_label(name: str, documentation: str, label: str, counts: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
