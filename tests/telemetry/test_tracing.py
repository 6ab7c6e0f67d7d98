"""The spans of requests, as an exporter receives them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import NoOpTracer, SpanKind, StatusCode

from radixkv.errors import DeadlinePassed, StepFailed
from radixkv.scheduling.request import Outcome
from radixkv.telemetry.tracing import Tracing
from radixkv.v1.prefill_pb2 import PrefillRequest
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.core_bench import Bench
from tests.patience import PATIENCE_S
from tests.telemetry.test_metrics import ended_request

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{SPAN_ID}-{flags}" for flags in ("01", "00"))
NOW_NS = 1_700_000_000_000_000_000
NOW_S = 107.0


class Exported:
    """A tracing observer, and the spans that it exported."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider.get_tracer("test"), lambda: NOW_NS)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def times_s(self) -> dict[str, tuple[float, float]]:
        """Return the start and end of each span by its name, in seconds of the engine's clock."""
        return {span.name: (engine_seconds(span.start_time), engine_seconds(span.end_time)) for span in self.spans}


def engine_seconds(time_ns: int | None) -> float:
    """Convert a Unix time to the engine's clock, on which `NOW_NS` is `NOW_S`."""
    assert time_ns is not None
    return NOW_S + (time_ns - NOW_NS) / 1e9


@pytest.fixture
def exported() -> Exported:
    return Exported()


def test_a_generation_has_a_span_with_a_child_per_phase(exported: Exported) -> None:
    request = ended_request(5, scheduled_s=102.0, prefilled_s=105.5)
    exported.tracing.request_ended(request, Outcome.FINISHED, None, NOW_S)
    assert exported.times_s() == {
        "queue": (100.0, 102.0),
        "prefill": (102.0, 105.5),
        "decode": (105.5, 107.0),
        "Generate": (100.0, 107.0),
    }
    *phases, request_span = exported.spans
    assert request_span.parent is None
    assert request_span.kind is SpanKind.SERVER
    assert request_span.status.status_code is StatusCode.UNSET
    assert request_span.context is not None
    for phase in phases:
        assert phase.parent is not None
        assert phase.parent.span_id == request_span.context.span_id


@pytest.mark.parametrize(
    ("fields", "phases"),
    [
        ({}, {"queue": (100.0, 107.0)}),
        ({"scheduled_s": 102.0}, {"queue": (100.0, 102.0), "prefill": (102.0, 107.0)}),
    ],
)
def test_a_request_that_ends_early_has_the_spans_of_the_phases_it_entered(
    exported: Exported, fields: dict[str, float], phases: dict[str, tuple[float, float]]
) -> None:
    exported.tracing.request_ended(ended_request(3, **fields), Outcome.CANCELLED, None, NOW_S)
    assert exported.times_s() == {**phases, "Generate": (100.0, 107.0)}


def test_attributes_of_a_generation_follow_the_conventions(exported: Exported) -> None:
    request = ended_request(5, scheduled_s=102.0, prefilled_s=105.0, cached_tokens=4, recomputed_tokens=2)
    exported.tracing.request_ended(request, Outcome.FINISHED, None, NOW_S)
    assert exported.spans[-1].attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "radixkv.computed_tokens": 6,
        "radixkv.recomputed_tokens": 2,
        "radixkv.miss_reason": "COLD",
        "radixkv.outcome": "finished",
        "radixkv.request_id": "",
    }


def test_the_span_of_a_failed_request_names_the_error(exported: Exported) -> None:
    error = StepFailed("step: the forward pass raised RuntimeError")
    exported.tracing.request_ended(ended_request(scheduled_s=102.0), Outcome.FAILED, error, NOW_S)
    span = exported.spans[-1]
    assert span.attributes is not None
    assert (span.name, span.attributes["error.type"], span.attributes["radixkv.outcome"]) == (
        "Prefill",
        "StepFailed",
        "failed",
    )
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, str(error))


def test_a_request_that_was_never_scheduled_has_no_cache_attributes(exported: Exported) -> None:
    exported.tracing.request_ended(ended_request(), Outcome.FAILED, DeadlinePassed("deadline: passed"), NOW_S)
    assert not {"radixkv.miss_reason", "radixkv.computed_tokens"} & set(exported.spans[-1].attributes or {})


def test_spans_contain_no_tokens_and_no_names_chosen_by_clients(exported: Exported) -> None:
    bench = Bench(observers=[exported.tracing])
    bench.prefill([251, 252, 253], tenant="secret-tenant", adapter="secret-adapter", salt="secret-salt")
    exported_json = " ".join(span.to_json() for span in exported.spans)
    assert "secret" not in exported_json
    assert not re.search(r"25[123]", json.dumps([dict(span.attributes or {}) for span in exported.spans]))


def test_the_clients_span_is_the_parent(exported: Exported) -> None:
    bench = Bench(observers=[exported.tracing])
    bench.prefill(range(8), traceparent=SAMPLED)
    for span in exported.spans:
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
    request_span = exported.spans[-1]
    assert request_span.parent is not None
    assert f"{request_span.parent.span_id:016x}" == SPAN_ID


def test_the_clients_sampling_decision_applies(exported: Exported) -> None:
    bench = Bench(observers=[exported.tracing])
    bench.prefill(range(8), traceparent=UNSAMPLED)
    assert exported.spans == ()


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", "00-" + "x" * 10_000])
def test_a_request_without_a_valid_parent_starts_a_trace(exported: Exported, traceparent: str) -> None:
    bench = Bench(observers=[exported.tracing])
    bench.prefill(range(8), traceparent=traceparent)
    assert [span.name for span in exported.spans] == ["queue", "prefill", "Prefill"]
    assert exported.spans[-1].parent is None


def test_a_sampler_decides_for_requests_without_a_parent() -> None:
    exported = Exported(ParentBased(ALWAYS_OFF))
    bench = Bench(observers=[exported.tracing])
    bench.prefill(range(8))
    bench.prefill(range(8), traceparent=SAMPLED)
    assert len(exported.spans) == 3


def test_a_tracer_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(NoOpTracer):
        def start_span(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("broken sampler")

    bench = Bench(observers=[Tracing(Broken())])
    assert bench.prefill(range(8)).usage.computed_tokens == 8
    assert "could not create the spans of a request" in caplog.text


PROGRAM = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from radixkv.service.cli.main import main
provider = TracerProvider()
file = open(sys.argv[1], "w")
exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\\n")
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.fixture
def traced_address(tmp_path: Path) -> Iterator[str]:
    """A service in a process that sets OpenTelemetry up, as `opentelemetry-instrument` does."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "spans")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def test_the_parent_is_read_from_the_metadata_of_a_call(traced_address: str, tmp_path: Path) -> None:
    with grpc.insecure_channel(traced_address) as channel:
        stub = PrefillServiceStub(channel)
        stub.Prefill(PrefillRequest(token_ids=[1, 2, 3]), metadata=[("traceparent", SAMPLED)], timeout=PATIENCE_S)
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    assert [span["name"] for span in spans] == ["queue", "prefill", "Prefill"]
    assert (spans[-1]["context"]["trace_id"], spans[-1]["parent_id"]) == (f"0x{TRACE_ID}", f"0x{SPAN_ID}")
    assert spans[-1]["attributes"]["gen_ai.usage.input_tokens"] == 3
