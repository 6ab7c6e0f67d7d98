"""OpenTelemetry spans of requests. Importing this module requires opentelemetry-api (the extra `tracing`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from radixkv.engine.observer import Observer
from radixkv.scheduling.request import Outcome, Request

_log = logging.getLogger(__name__)


class Tracing(Observer):
    """Creates the spans of a request when it ends, from the timestamps that the request keeps.

        client's span
        └─ Prefill | Generate    received ................................. ended
           ├─ queue              received ─ scheduled
           ├─ prefill                       scheduled ─ first token
           └─ decode                                    first token ─────── ended    (Generate only)

    `PrefillParams.traceparent` names the parent span. OpenTelemetry's default sampler follows the parent's sampling
    decision. A request that ends early has the spans of the phases that it entered.

    Attributes follow OpenTelemetry's semantic conventions for generative AI where they exist. They never contain tokens
    or names of tenants, adapters or salts, since traces are read by more people than metrics.

    Args:
        tracer: creates the spans. Its exceptions are logged.
        unix_ns: returns the current time in nanoseconds since 1970.
    """

    def __init__(self, tracer: trace.Tracer, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._unix_ns = unix_ns
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Create the spans of a request, if it is sampled."""
        try:
            self._trace(request, outcome, error, _UnixTimes(self._unix_ns(), now_s))
        except Exception:  # noqa: BLE001 - an error in a sampler or a span processor must not stop the engine
            _log.exception("could not create the spans of a request")

    def _trace(self, request: Request, outcome: Outcome, error: Exception | None, times: _UnixTimes) -> None:
        traceparent = request.params.traceparent
        span = self._tracer.start_span(
            "Prefill" if request.generation is None else "Generate",
            self._propagator.extract({"traceparent": traceparent}) if traceparent else Context(),
            SpanKind.SERVER,
            start_time=times.of(request.times.received_s),
        )
        if span.is_recording():
            span.set_attributes(_attributes(request, outcome))
            if error is not None:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR, str(error)))
            self._trace_phases(request, span, times)
        span.end(times.now_ns)

    def _trace_phases(self, request: Request, span: Span, times: _UnixTimes) -> None:
        """Create a span per phase. A phase ends when the next one begins, and the last one ends with the request."""
        phases = [("queue", request.times.received_s), ("prefill", request.times.scheduled_s)]
        if request.generation is not None:
            phases.append(("decode", request.times.prefilled_s))
        begun_phases = [(name, times.of(start_s)) for name, start_s in phases if start_s is not None]
        ends_ns = [start_ns for _, start_ns in begun_phases[1:]] + [times.now_ns]
        context = trace.set_span_in_context(span, Context())
        for (name, start_ns), end_ns in zip(begun_phases, ends_ns, strict=True):
            self._tracer.start_span(name, context, start_time=start_ns).end(end_ns)


class _UnixTimes:
    """Converts times of the engine's clock to nanoseconds since 1970, as OpenTelemetry requires."""

    def __init__(self, now_ns: int, now_s: float) -> None:
        self.now_ns = now_ns
        self._now_s = now_s

    def of(self, time_s: float) -> int:
        """Convert a time of the engine's clock, in seconds."""
        return self.now_ns - round((self._now_s - time_s) * 1e9)


def _attributes(request: Request, outcome: Outcome) -> dict[str, AttributeValue]:
    usage = request.usage
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "radixkv.request_id": request.params.request_id,
        "radixkv.outcome": outcome.value,
    }
    if request.times.scheduled_s is not None:  # the number of cached tokens is known only after admission
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        attributes["radixkv.computed_tokens"] = usage.computed_tokens
        attributes["radixkv.miss_reason"] = request.reuse.miss_reason.value
    generation = request.generation
    if generation is not None:
        attributes["gen_ai.operation.name"] = "text_completion"
        attributes["gen_ai.request.max_tokens"] = generation.sampling.max_new_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.generated_tokens
        attributes["radixkv.recomputed_tokens"] = usage.recomputed_tokens
        if generation.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = (generation.finish_reason.name.lower(),)
    return attributes
