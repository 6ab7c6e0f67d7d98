"""The options of a trace: its file, its format, and properties that the file does not state."""

from __future__ import annotations

import argparse

from radixkv.planning.trace import AUTO, TraceRequest, load_trace
from radixkv.planning.trace_formats import FORMATS, TIME_UNITS
from radixkv.service.cli.argument_types import positive
from radixkv.service.cli.options import Option

TRACE_OPTIONS = (
    Option("trace", "TRACE", None, "file of requests, plain or gzip, or a directory of such files"),
    Option(
        "--format",
        None,
        None,
        "format of the trace; `auto` detects it by the first request",
        AUTO,
        more={"choices": (AUTO, *FORMATS)},
    ),
    Option(
        "--tokens-per-id",
        "N",
        positive,
        "tokens per hash id of the trace (default: as the trace states, 16 for bailian, or the power of two that fits)",
    ),
    Option(
        "--timestamps",
        None,
        None,
        "unit of the timestamps of the trace (default: that of the format)",
        more={"choices": tuple(TIME_UNITS)},
    ),
    Option("--limit", "N", positive, "replay only the first N requests (default: all)"),
)


def requests_of(arguments: argparse.Namespace) -> list[TraceRequest]:
    """Read the trace.

    Raises:
        ConfigError: the file is not a trace of this format.
    """
    return load_trace(
        arguments.trace,
        limit=arguments.limit,
        format_name=arguments.format,
        tokens_per_id=arguments.tokens_per_id,
        timestamps=arguments.timestamps,
    )
