"""Spans reach the configured collector, and an unreachable collector affects nothing else."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra `tracing`")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from radixkv.config import TelemetryConfig
from radixkv.errors import ConfigError
from radixkv.telemetry import otlp
from radixkv.telemetry.otlp import Collector, collector_of, exported_spans, require_exportable
from radixkv.v1.prefill_pb2 import PrefillRequest
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.core_bench import Bench
from tests.patience import PATIENCE_S, wait_until
from tests.service.command_line import launch
from tests.started_threads import started_threads

ROOT = Path(__file__).parents[2]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
NO_COLLECTOR = "http://127.0.0.1:1"


class Receiver(TraceServiceServicer):
    """A collector.

    Attributes:
        batches: the received batches of spans.
        status: the error with which every call fails; None if calls succeed.
        num_failed: number of calls that failed.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self.batches: queue.Queue[ExportTraceServiceRequest] = queue.Queue()
        self.status: grpc.StatusCode | None = None

    def Export(self, request: Any, context: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802
        if self.status is not None:
            self.num_failed += 1
            context.abort(self.status, "on purpose")
        self.batches.put(request)
        return ExportTraceServiceResponse()

    def next_batch(self) -> ExportTraceServiceRequest:
        return self.batches.get(timeout=PATIENCE_S)


@contextlib.contextmanager
def serve(receiver: Receiver) -> Iterator[str]:
    """Serve a collector over gRPC, and return its URL."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        add_TraceServiceServicer_to_server(receiver, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def endpoint(receiver: Receiver) -> Iterator[str]:
    with serve(receiver) as url:
        yield url


def attributes_of(holder: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in holder.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def spans_of(batch: ExportTraceServiceRequest) -> list[Any]:
    return [span for resource in batch.resource_spans for scope in resource.scope_spans for span in scope.spans]


def observe_a_prefill(endpoint: str) -> None:
    """Export the spans of one prefill, and return when the spans have been sent or dropped."""
    with exported_spans(TelemetryConfig(endpoint)) as tracing:
        assert tracing is not None
        Bench(observers=[tracing]).prefill(range(8), traceparent=TRACEPARENT)


def test_a_request_becomes_a_span_of_the_clients_trace(endpoint: str, receiver: Receiver) -> None:
    command = [sys.executable, "-m", "radixkv.service", "serve", "--model", "tiny", "--port", "0"]
    command += ["--set", f"telemetry.otlp_endpoint={endpoint}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().removeprefix("listening on ").strip()
            with grpc.insecure_channel(address) as channel:
                prefill = PrefillServiceStub(channel).Prefill
                metadata = [("traceparent", TRACEPARENT)]
                prefill(PrefillRequest(token_ids=[1, 2, 3]), metadata=metadata, timeout=PATIENCE_S)
        finally:
            process.terminate()
            log = process.communicate(timeout=PATIENCE_S)[1]
    batch = receiver.next_batch()
    assert attributes_of(batch.resource_spans[0].resource)["service.name"] == "radixkv"
    spans = spans_of(batch)
    assert [span.name for span in spans] == ["queue", "prefill", "Prefill"]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert spans[-1].parent_span_id.hex() == SPAN_ID
    assert {span.parent_span_id for span in spans[:-1]} == {spans[-1].span_id}
    attributes = attributes_of(spans[-1])
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert attributes["radixkv.miss_reason"] == "COLD"
    assert f"exporting spans to {endpoint} over grpc" in log
    assert process.returncode == 0, log


def test_the_service_name_is_read_from_the_environment(
    endpoint: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-cache")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging,service.instance.id=first")
    observe_a_prefill(endpoint)
    resource = attributes_of(receiver.next_batch().resource_spans[0].resource)
    assert resource["service.name"] == "chat-cache"
    assert resource["deployment.environment.name"] == "staging"
    assert resource["service.instance.id"] == "first"


def test_headers_in_the_environment_are_sent(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received_metadata: list[tuple[str, str]] = []

    class MetadataRecorder(Receiver):
        def Export(self, request: Any, context: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802
            received_metadata.extend(context.invocation_metadata())
            return super().Export(request, context)

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abc")
    with serve(MetadataRecorder()) as url:
        observe_a_prefill(url)
    assert ("api-key", "abc") in received_metadata


def test_spans_are_sent_over_http() -> None:
    bodies: queue.Queue[tuple[str, bytes]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.put((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        observe_a_prefill(f"http://127.0.0.1:{server.server_port}/v1/traces")
        server.shutdown()
        serving.join()
    path, body = bodies.get(timeout=PATIENCE_S)
    assert path == "/v1/traces"
    assert [span.name for span in spans_of(ExportTraceServiceRequest.FromString(body))][-1] == "Prefill"


@pytest.fixture
def short_flush_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_FLUSH_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("short_flush_timeout")
def test_an_unreachable_collector_blocks_neither_requests_nor_the_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    started = started_threads()
    with caplog.at_level(logging.INFO), exported_spans(TelemetryConfig(NO_COLLECTOR)) as tracing:
        assert tracing is not None
        bench = Bench(observers=[tracing])
        for _ in range(1000):  # 3,000 spans, more than the queue of the exporter holds
            assert bench.prefill(range(8)).usage.prompt_tokens == 8
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 2  # one about the outage, and one about the spans that are dropped at shutdown
    assert "dropping spans that could not be sent within 0.2 s of shutdown" in warnings
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert not started("radixkv-spans-flush")


@pytest.mark.usefixtures("short_flush_timeout")
def test_an_outage_logs_one_warning_and_one_line_at_its_end(
    endpoint: str, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # ms between batches
    receiver.status = grpc.StatusCode.INVALID_ARGUMENT  # an error after which the exporter does not retry

    def messages(text: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if text in record.getMessage()]

    with caplog.at_level(logging.INFO), exported_spans(TelemetryConfig(endpoint)) as tracing:
        assert tracing is not None
        bench = Bench(observers=[tracing])

        def prefill_until(condition: Callable[[], bool]) -> None:
            wait_until(lambda: bool(bench.prefill(range(8))) and condition())

        prefill_until(lambda: receiver.num_failed >= 3)
        receiver.status = None
        prefill_until(lambda: messages("again") != [])
    (warning,) = messages("dropping spans")
    assert endpoint in warning
    assert "INVALID_ARGUMENT" in warning
    assert len(messages("again")) == 1


def test_without_an_endpoint_nothing_is_imported() -> None:
    program = """
import sys
from radixkv.config import Config
from radixkv.service.server.metrics_port import Telemetry
from radixkv.telemetry.otlp import exported_spans
with exported_spans(Config().telemetry) as tracing:
    print(tracing, Telemetry(Config(), tracing).observers, [name for name in sys.modules if "opentelemetry" in name])
"""
    assert launch("-c", program) == (0, "None [] []\n", "")


def test_the_error_for_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if "exporter" in module else object())
    with pytest.raises(
        ConfigError, match=r"telemetry\.otlp_endpoint: .*opentelemetry-exporter-otlp is missing; .*\[tracing\]"
    ):
        require_exportable(TelemetryConfig("http://localhost:4317"))


@pytest.mark.parametrize(
    ("endpoint", "environment", "collector"),
    [
        ("http://localhost:4317", {}, Collector("grpc", "http://localhost:4317")),
        ("grpc://localhost:4317", {}, Collector("grpc", "http://localhost:4317")),
        ("https://collector.example.com", {}, Collector("grpc", "https://collector.example.com")),
        ("http://localhost:4318", {}, Collector("http/protobuf", "http://localhost:4318/v1/traces")),
        ("http://localhost:80/otlp/traces", {}, Collector("http/protobuf", "http://localhost:80/otlp/traces")),
        (
            "http://[::1]:4317",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            Collector("http/protobuf", "http://[::1]:4317/v1/traces"),
        ),
        (
            "http://localhost:4318",
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            Collector("grpc", "http://localhost:4318"),
        ),
    ],
)
def test_endpoint_and_environment_determine_the_protocol(
    endpoint: str, environment: dict[str, str], collector: Collector
) -> None:
    assert collector_of(endpoint, environment) == collector


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "http://localhost", "ftp://localhost:4317", "http://:4317", "http://a:99999"]
)
def test_an_invalid_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"telemetry\.otlp_endpoint: expected a URL such as http://localhost:4317, got"
    ):
        collector_of(endpoint, {})


def test_credentials_in_the_url_are_refused_and_not_logged() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        collector_of("http://user:hunter2@localhost:4317", {})
    assert "hunter2" not in str(caught.value)


def test_an_unknown_protocol_is_refused_with_the_name_of_the_variable() -> None:
    with pytest.raises(
        ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: expected grpc or http/protobuf, got 'http/json'"
    ):
        collector_of("http://localhost:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_serve_refuses_an_invalid_endpoint_before_it_loads_a_model() -> None:
    code, out, err = launch("-m", "radixkv.service", "serve", "--set", "telemetry.otlp_endpoint=localhost:4317")
    assert (code, out) == (2, "")
    refusal = "telemetry.otlp_endpoint: expected a URL such as http://localhost:4317, got 'localhost:4317'\n"
    assert err.splitlines(keepends=True)[-1].endswith(refusal)
    assert "Traceback" not in err


def test_the_example_collector_prints_spans() -> None:
    command = [sys.executable, str(ROOT / "docs" / "examples" / "print_spans.py"), "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().removeprefix("receiving spans on port ").strip()
            observe_a_prefill(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
        lines = process.stdout.read().splitlines()
    names = [line.split()[6] for line in lines if line.startswith(f"trace {TRACE_ID} ")]
    assert names == ["queue", "prefill", "Prefill"]
    assert f"parent {SPAN_ID}" in "\n".join(lines)
    assert "    gen_ai.usage.input_tokens = 8" in lines
