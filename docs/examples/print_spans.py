"""A minimal collector: receives OpenTelemetry spans over OTLP/gRPC and prints a line for each.

Needs `pip install '.[tracing]'`.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Printer(TraceServiceServicer):
    """Prints spans in the order of arrival: the phases of a request, then the request."""

    def Export(self, request, context):  # noqa: N802 - the name on the wire
        """Print a batch."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    print_span(span)
        return ExportTraceServiceResponse()


def print_span(span):
    """Print a span's trace, ids, time and attributes."""
    parent = span.parent_span_id.hex() or "-"
    took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    print(f"trace {span.trace_id.hex()}  span {span.span_id.hex()}  parent {parent}  {span.name} {took_ms:.1f} ms")
    for attribute in span.attributes:
        value = attribute.value
        print(f"    {attribute.key} = {getattr(value, value.WhichOneof('value'))}".rstrip())
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="127.0.0.1:4317")
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        add_TraceServiceServicer_to_server(Printer(), server)
        port = server.add_insecure_port(parser.parse_args().address)
        server.start()
        print(f"receiving spans on port {port}", flush=True)
        try:
            server.wait_for_termination()
        except KeyboardInterrupt:
            server.stop(None).wait()
