"""Prometheus metrics of requests and steps, counted as they end. docs/METRICS.md lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from radixkv.api.miss_reason import MissReason
from radixkv.api.result import Usage
from radixkv.engine.observer import Observer
from radixkv.errors import RadixKVError
from radixkv.scheduling.request import Outcome, Request
from radixkv.telemetry.named_registry import NamedRegistry

# Callers choose the names of tenants, and each name is a series. Later tenants share one series.
MAX_UNKNOWN_TENANTS = 64
OTHER_TENANTS = "other"

KINDS = ("prefill", "generate")
PHASES = ("prefill", "decode")

# From a hit on a small model to a long prompt behind a long queue.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
# Seconds a token; finer where people notice.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_STEP_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_TOKENS = (0, 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Observer):
    """Counts requests, tokens and steps, in a registry of its own.

    Series are made in advance, so that counting a request looks up its tenant and counting a step nothing.

    Args:
        tenants: have token counters of their own, like the first `MAX_UNKNOWN_TENANTS` other tenants.

    Attributes:
        registry: collected by a scrape; other collectors may be registered.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self.registry = NamedRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files of the process
        self._requests = _RequestCounters(self.registry)
        self._times = _RequestTimes(self.registry)
        self._tokens = _TenantTokens(tenants, self.registry)
        self._steps = _StepMetrics(self.registry)

    def request_refused(self, error: RadixKVError) -> None:
        """Count a refusal by its class of error."""
        self._requests.refusals.labels(type(error).__name__).inc()

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Observe the time and the size of a step."""
        self._steps.seconds.observe(seconds)
        self._steps.requests.observe(num_requests)
        self._steps.prefill_tokens.observe(num_prefill_tokens)
        self._steps.decode_tokens.observe(num_decode_tokens)

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """Count a failed step."""
        self._steps.failures.inc()

    def request_paused(self, request: Request) -> None:
        """Count a pause."""
        self._requests.pauses.inc()

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Count a request, observe its times, and count its tokens if it finished."""
        self._requests.count(request, outcome, error)
        self._times.observe(request, outcome, now_s)
        if outcome is Outcome.FINISHED:
            self._tokens.count(request.tenant, request.usage)


class _RequestCounters:
    """Counters of requests by kind and outcome."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ended = Counter("radixkv_requests_total", "Requests that are over.", ["kind", "outcome"], registry=registry)
        self._ended = {kind: {outcome: ended.labels(kind, outcome.value) for outcome in Outcome} for kind in KINDS}
        self._failures = Counter(
            "radixkv_request_failures_total",
            "Queued requests that failed, by class of error.",
            ["error"],
            registry=registry,
        )
        self.refusals = Counter(
            "radixkv_request_refusals_total",
            "Requests that were refused at once and never queued, by class of error.",
            ["error"],
            registry=registry,
        )
        self.pauses = Counter(
            "radixkv_request_pauses_total", "How often a running request gave its blocks back.", registry=registry
        )
        reasons = Counter(
            "radixkv_miss_reasons_total",
            "Finished requests by why their prompt was not reused to its end.",
            ["reason"],
            registry=registry,
        )
        self._reasons = {reason: reasons.labels(reason.value.lower()) for reason in MissReason}

    def count(self, request: Request, outcome: Outcome, error: Exception | None) -> None:
        """Count a request that is over."""
        self._ended[_kind(request)][outcome].inc()
        if error is not None:
            self._failures.labels(type(error).__name__).inc()
        if outcome is Outcome.FINISHED:
            self._reasons[request.miss_reason].inc()


class _RequestTimes:
    """Histograms of the time that requests take.

    A completed phase is observed whatever the outcome of its request; times of a whole request only if it finished.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Histogram(
            "radixkv_request_queue_seconds",
            "Received until it had its blocks.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._prefill = Histogram(
            "radixkv_request_prefill_seconds",
            "From its blocks to its first token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._first_token = Histogram(
            "radixkv_time_to_first_token_seconds",
            "Received until the first token was known: queue and prefill.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._output_token = Histogram(
            "radixkv_time_per_output_token_seconds",
            "Seconds a token after the first, in the mean of a finished generation.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        durations = Histogram(
            "radixkv_request_duration_seconds",
            "Received until answered, of finished requests.",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._durations = {kind: durations.labels(kind) for kind in KINDS}

    def observe(self, request: Request, outcome: Outcome, now_s: float) -> None:
        """Observe the times of a request that is over."""
        received_s, scheduled_s, prefilled_s = request.received_s, request.scheduled_s, request.prefilled_s
        if scheduled_s is not None:
            self._queue.observe(scheduled_s - received_s)
            if prefilled_s is not None:
                self._prefill.observe(prefilled_s - scheduled_s)
                self._first_token.observe(prefilled_s - received_s)
        if outcome is not Outcome.FINISHED:
            return
        self._durations[_kind(request)].observe(now_s - received_s)
        if request.generation is not None and prefilled_s is not None and len(request.generation.token_ids) > 1:
            self._output_token.observe((now_s - prefilled_s) / (len(request.generation.token_ids) - 1))


_TIERS = ("host", "disk", "remote")


class _TokenCounters(NamedTuple):
    """The counters of one tenant."""

    prompt: Counter
    cached: Counter
    public: Counter
    computed: Counter
    generated: Counter
    recomputed: Counter


class _TenantTokens:
    """Counters of `Usage` by tenant, over finished requests."""

    def __init__(self, tenants: Iterable[str], registry: CollectorRegistry) -> None:
        self._metrics = _TokenCounters(
            prompt=_token_counter("prompt", "Tokens of prompts.", registry),
            cached=_token_counter("cached", "Prompt tokens that were reused.", registry),
            public=_token_counter("public", "Cached tokens that came from a public prefix.", registry),
            computed=_token_counter("computed", "Prompt tokens that were computed.", registry),
            generated=_token_counter("generated", "Tokens that were generated.", registry),
            recomputed=_token_counter("recomputed", "Tokens that were computed again after a pause.", registry),
        )
        loaded = Counter(
            "radixkv_loaded_tokens_total", "Cached tokens that were loaded, by tier.", ["tier"], registry=registry
        )
        self._loaded = {tier: loaded.labels(tier) for tier in _TIERS}
        self._others = self._of(OTHER_TENANTS)
        self._by_tenant = {tenant: self._of(tenant) for tenant in tenants}
        self._most_tenants = len(self._by_tenant) + MAX_UNKNOWN_TENANTS

    def count(self, tenant: str, usage: Usage) -> None:
        """Add the tokens of a request."""
        counters = self._by_tenant.get(tenant)
        if counters is None:
            counters = self._others
            if len(self._by_tenant) < self._most_tenants:
                counters = self._by_tenant[tenant] = self._of(tenant)
        counters.prompt.inc(usage.prompt_tokens)
        counters.cached.inc(usage.cached_tokens)
        counters.public.inc(usage.public_tokens)
        for tier, num_tokens in zip(_TIERS, (usage.host_tokens, usage.disk_tokens, usage.remote_tokens), strict=True):
            self._loaded[tier].inc(num_tokens)
        counters.computed.inc(usage.computed_tokens)
        counters.generated.inc(usage.generated_tokens)
        counters.recomputed.inc(usage.recomputed_tokens)

    def _of(self, tenant: str) -> _TokenCounters:
        # A lone surrogate would make every scrape fail, and terminals obey control characters.
        label = tenant if tenant.isprintable() else tenant.encode("unicode_escape").decode("ascii")
        return _TokenCounters(*(metric.labels(label) for metric in self._metrics))


class _StepMetrics:
    """Histograms of forward passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram("radixkv_step_seconds", "Time of a step.", registry=registry, buckets=_SECONDS)
        self.requests = Histogram(
            "radixkv_step_requests", "Requests of a step.", registry=registry, buckets=_STEP_REQUESTS
        )
        tokens = Histogram(
            "radixkv_step_tokens", "Tokens of a step, by phase.", ["phase"], registry=registry, buckets=_STEP_TOKENS
        )
        self.prefill_tokens, self.decode_tokens = (tokens.labels(phase) for phase in PHASES)
        self.failures = Counter("radixkv_step_failures_total", "Steps that raised.", registry=registry)


def _kind(request: Request) -> str:
    return "prefill" if request.generation is None else "generate"


def _token_counter(name: str, documentation: str, registry: CollectorRegistry) -> Counter:
    return Counter(f"radixkv_{name}_tokens_total", documentation, ["tenant"], registry=registry)
