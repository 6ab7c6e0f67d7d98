"""Prometheus counters and histograms of calls, requests and steps. docs/METRICS.md lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.registry import RestrictedRegistry

from radixkv.api.miss_reason import MissReason
from radixkv.api.result import Usage
from radixkv.engine.observer import Observer
from radixkv.errors import DeadlinePassed, InvalidCredential, InvalidRequest, NotPermitted, QueueFull, RadixKVError
from radixkv.scheduling.request import Outcome, Request

# Maximum number of tenants without a section in the configuration that get time series of their own, since clients
# choose tenant names. Further tenants share the series `other`.
MAX_UNKNOWN_TENANTS = 64
OTHER_TENANTS = "other"

KINDS = ("prefill", "generate")
PHASES = ("prefill", "decode")
_TIERS = ("host", "disk", "remote")

# The label `reason` of refused calls, by class of error: the first matching class decides. The set of reasons is fixed,
# so that clients cannot create time series.
_REFUSAL_REASONS: tuple[tuple[type[RadixKVError], str], ...] = (
    (InvalidCredential, "unauthenticated"),
    (NotPermitted, "forbidden"),
    (InvalidRequest, "malformed"),
    (DeadlinePassed, "slow"),
    (QueueFull, "busy"),
)
_OTHER_REASON = "other"

# What prometheus_client appends to the name of a metric to form the names of its samples, apart from `_created`.
_SAMPLE_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")

# From a cache hit with a small model to a long prompt after a long time in the queue.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
# Seconds per token, with fine buckets in the range that users notice.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_STEP_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_TOKENS = (0, 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Observer):
    """Counts calls, requests, tokens and steps in a registry of its own.

    Time series are created in advance, except those whose label is a tenant without a section or a class of errors.
    Counting a finished request looks up the series of its tenant, and counting a failed or refused one that of its
    class of error; counting a step looks up nothing.

    Args:
        tenants: tenants that get their own token counters, in addition to the first `MAX_UNKNOWN_TENANTS` others.

    Attributes:
        registry: the metrics that a scrape returns. Other collectors may be registered with it.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self.registry: CollectorRegistry = _NamedRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files of the process
        self._refused_calls = _RefusedCalls(self.registry)
        self._requests = _RequestCounters(self.registry)
        self._times = _PhaseHistograms(self.registry)
        self._tokens = _TenantTokens(tenants, self.registry)
        self._steps = _StepMetrics(self.registry)

    def call_refused(self, error: RadixKVError) -> None:
        """Count a call that was refused before it reached the engine, by the reason."""
        self._refused_calls.count(error)

    def request_refused(self, error: RadixKVError) -> None:
        """Count a request that the engine refused, by its class of error."""
        self._requests.refusals.labels(type(error).__name__).inc()

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Record the duration and the size of a step."""
        self._steps.seconds.observe(seconds)
        self._steps.requests.observe(num_requests)
        self._steps.prefill_tokens.observe(num_prefill_tokens)
        self._steps.decode_tokens.observe(num_decode_tokens)

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """Count a failed step."""
        self._steps.failures.inc()

    def request_preempted(self, request: Request) -> None:
        """Count a preemption."""
        self._requests.preemptions.inc()

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Count a request, record its times and, if it finished, its tokens."""
        self._requests.count(request, outcome, error)
        self._times.observe(request, outcome, now_s)
        if outcome is Outcome.FINISHED:
            self._tokens.count(request.tenant, request.usage)


class _NamedRegistry(CollectorRegistry):
    """A registry in which `name[]=NAME` of a scrape also selects the samples of the metric NAME, except `_created`."""

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return a view that collects only the samples with these names, and those of the metrics with these names."""
        return super().restricted_registry({name + suffix for name in names for suffix in _SAMPLE_SUFFIXES})


class _RefusedCalls:
    """Counter of calls that are refused before they reach the engine.

    All time series exist from the start, so that a rate sees the first refusal too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "radixkv_refused_calls_total",
            "Calls that were refused before they reached the engine, by reason.",
            ["reason"],
            registry=registry,
        )
        reasons = [*dict(_REFUSAL_REASONS).values(), _OTHER_REASON]
        self._by_reason = {reason: counter.labels(reason) for reason in reasons}

    def count(self, error: RadixKVError) -> None:
        """Count a call by the error with which it was refused."""
        for error_class, reason in _REFUSAL_REASONS:
            if isinstance(error, error_class):
                self._by_reason[reason].inc()
                return
        self._by_reason[_OTHER_REASON].inc()


class _RequestCounters:
    """Counters of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ended = Counter(
            "radixkv_requests_total", "Requests that ended, by outcome.", ["kind", "outcome"], registry=registry
        )
        self._ended = {kind: {outcome: ended.labels(kind, outcome.value) for outcome in Outcome} for kind in KINDS}
        self._failures = Counter(
            "radixkv_request_failures_total",
            "Requests that were queued and then failed, by class of error.",
            ["error"],
            registry=registry,
        )
        self.refusals = Counter(
            "radixkv_request_refusals_total",
            "Requests that were refused without being queued, by class of error.",
            ["error"],
            registry=registry,
        )
        self.preemptions = Counter(
            "radixkv_request_pauses_total", "Preemptions of running requests.", registry=registry
        )
        miss_reasons = Counter(
            "radixkv_miss_reasons_total",
            "Finished requests, by the reason why the rest of the prompt was not cached.",
            ["reason"],
            registry=registry,
        )
        self._by_miss_reason = {reason: miss_reasons.labels(reason.value.lower()) for reason in MissReason}

    def count(self, request: Request, outcome: Outcome, error: Exception | None) -> None:
        """Count a request that ended."""
        self._ended[_kind(request)][outcome].inc()
        if error is not None:
            self._failures.labels(type(error).__name__).inc()
        if outcome is Outcome.FINISHED:
            self._by_miss_reason[request.reuse.miss_reason].inc()


class _PhaseHistograms:
    """Histograms of the phases and durations of requests.

    A completed phase is recorded even if the request fails later; the duration only if the request finishes.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Histogram(
            "radixkv_request_queue_seconds",
            "Time from the arrival of a request until it is scheduled.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._prefill = Histogram(
            "radixkv_request_prefill_seconds",
            "Time from the scheduling of a request until its first token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._first_token = Histogram(
            "radixkv_time_to_first_token_seconds",
            "Time from the arrival of a request until its first token: queue and prefill.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._output_token = Histogram(
            "radixkv_time_per_output_token_seconds",
            "Mean time per output token after the first, for each finished generation.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        durations = Histogram(
            "radixkv_request_duration_seconds",
            "Time from the arrival of a finished request until its last response.",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._durations = {kind: durations.labels(kind) for kind in KINDS}

    def observe(self, request: Request, outcome: Outcome, now_s: float) -> None:
        """Record the times of a request that ended."""
        received_s = request.times.received_s
        scheduled_s = request.times.scheduled_s
        prefilled_s = request.times.prefilled_s
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


class _TokenCounters(NamedTuple):
    """The counters of one tenant; or the metrics from which the counters of all tenants are created."""

    prompt: Counter
    cached: Counter
    public: Counter
    computed: Counter
    generated: Counter
    recomputed: Counter


class _TenantTokens:
    """Token counters of finished requests, by tenant."""

    def __init__(self, tenants: Iterable[str], registry: CollectorRegistry) -> None:
        self._metrics = _TokenCounters(
            prompt=_token_counter("prompt", "Prompt tokens, cached and computed.", registry),
            cached=_token_counter("cached", "Prompt tokens that were reused from the cache.", registry),
            public=_token_counter("public", "Cached tokens that belong to a public prefix.", registry),
            computed=_token_counter("computed", "Prompt tokens that were computed.", registry),
            generated=_token_counter("generated", "Generated tokens.", registry),
            recomputed=_token_counter("recomputed", "Tokens that were computed again after a preemption.", registry),
        )
        loaded = Counter(
            "radixkv_loaded_tokens_total", "Cached tokens that were loaded from a tier.", ["tier"], registry=registry
        )
        self._loaded = {tier: loaded.labels(tier) for tier in _TIERS}
        self._others = self._create_counters(OTHER_TENANTS)
        self._by_tenant = {tenant: self._create_counters(tenant) for tenant in tenants}
        self._max_tenants = len(self._by_tenant) + MAX_UNKNOWN_TENANTS

    def count(self, tenant: str, usage: Usage) -> None:
        """Add the tokens of a request."""
        counters = self._by_tenant.get(tenant)
        if counters is None:
            counters = self._others
            if len(self._by_tenant) < self._max_tenants:
                counters = self._by_tenant[tenant] = self._create_counters(tenant)
        counters.prompt.inc(usage.prompt_tokens)
        counters.cached.inc(usage.cached_tokens)
        counters.public.inc(usage.public_tokens)
        for tier, num_tokens in zip(_TIERS, (usage.host_tokens, usage.disk_tokens, usage.remote_tokens), strict=True):
            self._loaded[tier].inc(num_tokens)
        counters.computed.inc(usage.computed_tokens)
        counters.generated.inc(usage.generated_tokens)
        counters.recomputed.inc(usage.recomputed_tokens)

    def _create_counters(self, tenant: str) -> _TokenCounters:
        # A lone surrogate would make every scrape fail, and control characters would reach terminals.
        label = tenant if tenant.isprintable() else tenant.encode("unicode_escape").decode("ascii")
        return _TokenCounters(*(metric.labels(label) for metric in self._metrics))


class _StepMetrics:
    """Histograms of steps, which are forward passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram("radixkv_step_seconds", "Duration of a step.", registry=registry, buckets=_SECONDS)
        self.requests = Histogram(
            "radixkv_step_requests", "Number of requests in a step.", registry=registry, buckets=_STEP_REQUESTS
        )
        tokens = Histogram(
            "radixkv_step_tokens",
            "Number of tokens in a step, by phase.",
            ["phase"],
            registry=registry,
            buckets=_STEP_TOKENS,
        )
        self.prefill_tokens, self.decode_tokens = (tokens.labels(phase) for phase in PHASES)
        self.failures = Counter(
            "radixkv_step_failures_total", "Steps that failed with an exception.", registry=registry
        )


def _kind(request: Request) -> str:
    return "prefill" if request.generation is None else "generate"


def _token_counter(name: str, documentation: str, registry: CollectorRegistry) -> Counter:
    return Counter(f"radixkv_{name}_tokens_total", documentation, ["tenant"], registry=registry)
