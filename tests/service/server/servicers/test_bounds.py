"""Every numeric bound in the comments of the .proto files: the limit is accepted, and the next value is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import MAX_CHARS, GrammarText
from radixkv.v1 import cache_pb2_grpc, prefill_pb2_grpc
from radixkv.v1.cache_pb2 import ListSegmentsRequest
from radixkv.v1.prefill_pb2 import (
    H2O,
    SNAPKV,
    STREAMING_LLM,
    Compression,
    GenerateRequest,
    PrefillRequest,
    ProbeRequest,
    RenewRequest,
    Retention,
)
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

PROTO = Path(__file__).parents[4] / "proto" / "radixkv" / "v1"
# A number, and the words that make it a bound.
BOUND = re.compile(r"\bat (most|least) -?\d|(?<![\w`.])-?\d[\d.,e-]* to -?\d|[Mm]ore than \d|(?:most|least) one\b")
PROMPT = range(8)
MAX_TTL_S = 31_622_400  # 366 days


class CheckingEngine(FakeEngine):
    """A fake engine that refuses prompts as a real one does."""

    def prefill(self, params):
        self.limits.require_prefill(params)
        return super().prefill(params)


class Bounds(NamedTuple):
    """Requests at the ends of the bounds of a field, and one step beyond them."""

    inside: list[Any]
    outside: list[Any]


def prefill(**fields: Any) -> PrefillRequest:
    return PrefillRequest(**{"token_ids": PROMPT, **fields})


def generate(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"prefill": prefill(), "max_new_tokens": 2, **fields})


def float_bounds(name: str, low: float, high: float, *, is_low_open: bool = False) -> Bounds:
    """Return the bounds of a float field, with NaN outside; with `is_low_open`, the lower one is outside."""
    inside, outside = [], [np.nan]
    for end, outward, is_open in ((low, -np.inf, is_low_open), (high, np.inf, False)):
        nearest = np.float32(end)
        inside.append(np.nextafter(nearest, -outward, dtype=np.float32) if is_open else nearest)
        outside.append(nearest if is_open else np.nextafter(nearest, outward, dtype=np.float32))
    return Bounds(
        [generate(**{name: float(value)}) for value in inside],
        [generate(**{name: float(value)}) for value in outside],
    )


def prefill_retained(priority: int = 50, seconds: int = 1, nanos: int = 0) -> PrefillRequest:
    return prefill(retention=Retention(priority=priority, ttl=Duration(seconds=seconds, nanos=nanos)))


def generate_compressed(**fields: Any) -> GenerateRequest:
    return generate(compression=Compression(**fields))


def name_bounds(field: str) -> Bounds:
    """Return the bounds of the length of a name, in each request that has this field."""
    kinds = (PrefillRequest,) if field in ("request_id", "session_id") else (PrefillRequest, ProbeRequest)
    inside = [kind(**{"token_ids": PROMPT, field: "n" * 256}) for kind in kinds]
    return Bounds(inside, [kind(**{"token_ids": PROMPT, field: "n" * 257}) for kind in kinds])


TABLE = {
    "PrefillRequest.token_ids": Bounds([prefill(token_ids=[0])], [prefill(token_ids=[])]),
    "PrefillRequest.tenant": name_bounds("tenant"),
    # No adapter is loaded, so names within the bounds are refused too, as unknown.
    "PrefillRequest.adapter": Bounds([], [prefill(adapter="n" * 257)]),
    "PrefillRequest.salt": name_bounds("salt"),
    "PrefillRequest.request_id": name_bounds("request_id"),
    "PrefillRequest.session_id": name_bounds("session_id"),
    "PrefillRequest.top_logprobs": Bounds([prefill(top_logprobs=n) for n in (0, 100)], [prefill(top_logprobs=101)]),
    "PrefillRequest.priority": Bounds([prefill(priority=n) for n in (0, 100)], [prefill(priority=101)]),
    "Retention.priority": Bounds([prefill_retained(n) for n in (0, 100)], [prefill_retained(101)]),
    "Retention.ttl": Bounds(
        [prefill_retained(seconds=0, nanos=1), prefill_retained(seconds=MAX_TTL_S)],
        [
            prefill_retained(seconds=0),
            prefill_retained(seconds=-1),
            prefill_retained(seconds=MAX_TTL_S, nanos=1),
            prefill_retained(seconds=MAX_TTL_S + 1),
        ],
    ),
    "GenerateRequest.max_new_tokens": Bounds([generate(max_new_tokens=1)], [generate(max_new_tokens=0)]),
    "GenerateRequest.top_p": float_bounds("top_p", 0, 1, is_low_open=True),
    "GenerateRequest.min_p": float_bounds("min_p", 0, 1),
    "GenerateRequest.repetition_penalty": float_bounds("repetition_penalty", 1e-6, 1e6),
    "GenerateRequest.presence_penalty": float_bounds("presence_penalty", -2, 2),
    "GenerateRequest.frequency_penalty": float_bounds("frequency_penalty", -2, 2),
    "GenerateRequest.stop_token_ids": Bounds(
        [generate(stop_token_ids=[1] * 1024)], [generate(stop_token_ids=[1] * 1025)]
    ),
    "GenerateRequest.logit_bias": Bounds(
        [generate(logit_bias={1: -100, 2: 100})],
        [
            generate(logit_bias={1: float(np.nextafter(np.float32(-100), np.float32(-np.inf)))}),
            generate(logit_bias={1: float(np.nextafter(np.float32(100), np.float32(np.inf)))}),
        ],
    ),
    "GenerateRequest.logprobs": Bounds([generate(logprobs=n) for n in (0, 100)], [generate(logprobs=101)]),
    "GenerateRequest.prompt_logprobs": Bounds(
        [generate(prompt_logprobs=n) for n in (0, 100)], [generate(prompt_logprobs=101)]
    ),
    "GenerateRequest.n": Bounds([generate(n=n) for n in (1, 64)], [generate(n=n) for n in (0, 65)]),
    "GenerateRequest.stop": Bounds(
        [generate(stop=[chr(65 + n) for n in range(16)]), generate(stop=["s" * 256])],
        [generate(stop=[chr(65 + n) for n in range(17)]), generate(stop=["s" * 257]), generate(stop=[""])],
    ),
    "Compression.max_tokens": Bounds(
        [generate_compressed(policy=H2O, max_tokens=2)], [generate_compressed(policy=H2O, max_tokens=n) for n in (0, 1)]
    ),
    "Compression.num_sinks": Bounds(
        [generate_compressed(policy=STREAMING_LLM, max_tokens=n, num_sinks=n - 1) for n in (2, 9)],
        [generate_compressed(policy=STREAMING_LLM, max_tokens=9, num_sinks=9)],
    ),
    "Compression.window": Bounds(
        [
            generate_compressed(policy=SNAPKV, max_tokens=999, window=256),
            generate_compressed(policy=H2O, max_tokens=9, window=8),
        ],
        [
            generate_compressed(policy=SNAPKV, max_tokens=999, window=257),
            generate_compressed(policy=H2O, max_tokens=9, window=9),
        ],
    ),
    # No lease is held, so requests within the bounds are refused too, because the lease is unknown.
    "RenewRequest.tenant": Bounds([], [RenewRequest(lease_id="x", tenant="n" * 257)]),
    "ListSegmentsRequest.page_size": Bounds(
        [ListSegmentsRequest(page_size=n) for n in (1, 1000)], [ListSegmentsRequest(page_size=n) for n in (0, 1001)]
    ),
}
# Fields whose bounds other tests check, and fields of responses, or of whole requests, whose bounds are not limits.
CHECKED_ELSEWHERE = {
    "GenerateRequest.json_schema",  # below
    "GenerateRequest.regex",
    "GenerateRequest.grammar",
    "ListSegmentsRequest.hottest_first",  # tests/service/server/test_hottest_segments.py
    "StatsResponse.namespaces",
    "StatsResponse.tenants",
    "StatsRequest.max_tenants",  # beyond, fewer are returned
    "StatsRequest.max_sessions",  # tests/whole/test_sessions.py
    "ListSegmentsRequest.session_id",  # tests/whole/test_sessions.py
    "RegisterPublicPrefixRequest.token_ids",  # tests/service/server/servicers/test_cache_public_prefixes.py
    "RouteRequest.token_ids",  # tests/service/fleet
    "TokenizerChunk.data",
    "FetchKVResponse.data",
    "Usage.computed_tokens",
    "ExplainRequest.segments",  # tests/service/server/servicers/test_explanations.py
    "ExplainResponse.computed_s",
    "Difference.prompt_span_tokens",
    "DiagnoseRequest.max_causes",  # tests/service/server/servicers/test_diagnoses.py
    "DiagnosedCause.place",
    "StatementRequest.since",  # tests/api/test_statement.py
    "StatementResponse.lines",  # tests/statements/test_statement_book.py
}


def documented_fields() -> Iterator[str]:
    """Yield each field whose comment gives a numeric bound."""
    for file in sorted(PROTO.glob("*.proto")):
        message, comment = "", ""
        for line in file.read_text().splitlines():
            text = line.strip()
            if text.startswith("//"):
                comment += text[2:]
            elif text.startswith("message "):
                message, comment = text.split()[1], ""
            elif field := re.match(r"[\w.<>, ]+ (\w+) = \d+;", text):
                if BOUND.search(comment):
                    yield f"{message}.{field[1]}"
                comment = ""
            elif text:
                comment = ""


def test_every_documented_bound_is_checked_here_or_elsewhere() -> None:
    fields = set(documented_fields())
    assert len(fields) > 25
    assert fields - set(TABLE) - CHECKED_ELSEWHERE == set()


async def outcome_of(channel: grpc.aio.Channel, request: Any) -> str:
    """Return OK, or the status and the message of the refusal."""
    prefills = prefill_pb2_grpc.PrefillServiceStub(channel)
    try:
        if isinstance(request, GenerateRequest):
            async for _ in prefills.Generate(request, timeout=PATIENCE_S):
                pass
        elif isinstance(request, ListSegmentsRequest):
            await cache_pb2_grpc.CacheServiceStub(channel).ListSegments(request, timeout=PATIENCE_S)
        else:
            method = type(request).__name__.removesuffix("Request")
            await getattr(prefills, method)(request, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    return "OK"


def test_each_bound_holds_at_its_ends_and_not_one_step_beyond() -> None:
    async def run() -> dict[str, str]:
        wrong = {}
        async with (
            serving(CheckingEngine(), model_path="tiny") as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            for field, bounds in TABLE.items():
                for requests, expected in ((bounds.inside, "OK"), (bounds.outside, "INVALID_ARGUMENT")):
                    for request in requests:
                        outcome = await outcome_of(channel, request)
                        if not outcome.startswith(expected):
                            wrong[f"{field}: {request}"[:200]] = outcome
        return wrong

    wrong = asyncio.run(run())
    assert not wrong, "\n".join(f"{request} {outcome}" for request, outcome in wrong.items())


def test_as_many_tokens_may_have_a_bias_as_documented() -> None:
    Sampling(logit_bias=tuple((token_id, 1.0) for token_id in range(1024))).validate(vocab_size=2000)
    with pytest.raises(InvalidRequest, match="logit_bias: expected at most 1024 tokens"):
        Sampling(logit_bias=tuple((token_id, 1.0) for token_id in range(1025))).validate(vocab_size=2000)


@pytest.mark.parametrize("kind", MAX_CHARS)
def test_a_grammar_may_be_as_long_as_documented(kind: str) -> None:
    text = (PROTO / "prefill.proto").read_text()
    assert f"at most {MAX_CHARS[kind]:,} characters" in text
    GrammarText("grammar", kind, "a" * MAX_CHARS[kind]).require_short()
    with pytest.raises(InvalidRequest, match=f"expected at most {MAX_CHARS[kind]} characters"):
        GrammarText("grammar", kind, "a" * (MAX_CHARS[kind] + 1)).require_short()
