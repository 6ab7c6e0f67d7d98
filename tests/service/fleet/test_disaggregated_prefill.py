"""The two steps of a generation and failures between them, with replicas with scripted responses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from radixkv.errors import Cause, NoReplica
from radixkv.service.fleet.disaggregated_prefill import DisaggregatedPrefill, with_prefill_usage
from radixkv.service.fleet.forwarder import Forwarder, ReplicaRefusal
from radixkv.service.fleet.routing_request import RoutingRequest
from radixkv.v1.explain_pb2 import ExplainResponse
from radixkv.v1.prefill_pb2 import (
    DIVERGED,
    NONE,
    GenerateRequest,
    GenerateResponse,
    PrefillRequest,
    PrefillResponse,
    Timing,
    Usage,
)
from tests.service.fleet.fake_connection import FakeConnection, facts, failure

LOST = failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
# A replica that restarted no longer has the lease, and one that is gone does not answer.
NO_LEASE = failure(grpc.StatusCode.NOT_FOUND, "in any words", Cause.KV_SOURCE)
NO_SOURCE = failure(grpc.StatusCode.UNAVAILABLE, "in any words", Cause.KV_SOURCE)
REQUEST = GenerateRequest(prefill=PrefillRequest(token_ids=[1, 2, 3], tenant="acme"), max_new_tokens=2)
ANSWER = [GenerateResponse(token_ids=[7], usage=Usage(prompt_tokens=3)), GenerateResponse(token_ids=[8], finished=True)]


class Replicas:
    """Replicas of one role that are chosen in order, with the response of each to each call."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.connections = {name: FakeConnection(facts(name)) for name in answers}
        self.requests: list[tuple[str, Any]] = []
        self.released: list[tuple[str, str]] = []
        self.calls: list[Call] = []
        self.explanation: ExplainResponse | None = None
        for name, connection in self.connections.items():
            connection.metadata = ()
            connection.prefill.Prefill = lambda request, name=name: self.prefill(name, request)
            connection.prefill.Generate = lambda request, name=name: self.generate(name, request)
            connection.prefill.Release = lambda request, name=name, **_: self.release(name, request)
        self.forwarder = Forwarder(self.choose, 0.0)

    async def choose(self, prompt: RoutingRequest) -> Any:
        for name, connection in self.connections.items():
            if name not in prompt.avoid:
                return SimpleNamespace(name=name, connection=connection, finish=lambda *_: None)
        raise NoReplica("replicas: none is available")

    async def prefill(self, name: str, request: PrefillRequest) -> PrefillResponse:
        self.requests.append((name, request))
        answer = self.answers[name].pop(0)
        if isinstance(answer, Exception):
            raise answer
        usage = Usage(prompt_tokens=3, cached_tokens=1, computed_tokens=2, device_tokens=1)
        explanation = self.explanation if request.explain else None
        return PrefillResponse(lease_id=answer, epoch=5, usage=usage, explanation=explanation)

    def generate(self, name: str, request: GenerateRequest) -> Call:
        self.requests.append((name, request))
        self.calls.append(Call(self.answers[name].pop(0)))
        return self.calls[-1]

    async def release(self, name: str, request: Any) -> None:
        assert request.tenant == "acme"
        self.released.append((name, request.lease_id))


class Call:
    """A streaming call of a decode replica, which reads from a list of responses and errors."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = list(parts)
        self.is_cancelled = False

    async def read(self) -> Any:
        part = self.parts.pop(0) if self.parts else grpc.aio.EOF
        if isinstance(part, Exception):
            raise part
        if isinstance(part, GenerateResponse):
            copied = GenerateResponse()
            copied.CopyFrom(part)
            return copied
        return part

    def cancel(self) -> None:
        self.is_cancelled = True


class Split:
    """A fleet of prefill replicas (`computing`) and decode replicas (`generating`)."""

    def __init__(self, computing: Replicas, generating: Replicas) -> None:
        self.computing, self.generating = computing, generating
        self.disaggregated = DisaggregatedPrefill(computing.forwarder, generating.forwarder)

    def parts(self, request: GenerateRequest = REQUEST) -> Any:
        return self.disaggregated.stream(
            request, lambda: RoutingRequest(b"123412341234", "acme"), lambda connection: {}
        )

    def answer(self, request: GenerateRequest = REQUEST) -> list[GenerateResponse]:
        async def all_parts() -> list[GenerateResponse]:
            try:
                return [part async for _, part in self.parts(request)]
            finally:
                await self.disaggregated.finish()

        return asyncio.run(all_parts())

    @property
    def sources(self) -> list[tuple[str, str]]:
        """The decode replicas that were called, each with the lease from which it was to fetch the K/V."""
        return [(name, request.kv_source.lease_id) for name, request in self.generating.requests]


def tokens_of(parts: list[GenerateResponse]) -> list[int]:
    return [token_id for part in parts for token_id in part.token_ids]


def test_one_replica_prefills_and_another_one_decodes() -> None:
    split = Split(Replicas(p=["lease"]), Replicas(d=[ANSWER]))
    parts = split.answer()
    assert tokens_of(parts) == [7, 8]
    ((_, computed),) = split.computing.requests
    assert (computed.hold_lease, computed.tenant, list(computed.token_ids)) == (True, "acme", [1, 2, 3])
    ((_, generated),) = split.generating.requests
    source = generated.kv_source
    assert (source.address, source.lease_id, source.epoch, generated.max_new_tokens) == ("p", "lease", 5, 2)
    assert not generated.prefill.hold_lease
    assert split.computing.released == [("p", "lease")]
    assert (parts[0].usage.cached_tokens, parts[0].usage.computed_tokens) == (1, 2)
    assert not REQUEST.HasField("kv_source")


def test_another_replica_decodes_from_the_same_lease_if_one_is_lost() -> None:
    split = Split(Replicas(p=["lease"]), Replicas(d=[[LOST]], e=[ANSWER]))
    assert tokens_of(split.answer()) == [7, 8]
    assert split.sources == [("d", "lease"), ("e", "lease")]
    assert split.computing.released == [("p", "lease")]


@pytest.mark.parametrize("lost", [NO_LEASE, NO_SOURCE], ids=["restarted", "gone"])
def test_a_prompt_whose_lease_is_lost_is_prefilled_by_another_replica(lost: Exception) -> None:
    split = Split(Replicas(p=["one"], q=["two"]), Replicas(d=[[lost], ANSWER]))
    assert tokens_of(split.answer()) == [7, 8]
    assert split.sources == [("d", "one"), ("d", "two")], "the decode replica is not avoided"
    assert split.computing.released == [("p", "one"), ("q", "two")]


def test_a_source_that_fails_health_checks_is_abandoned() -> None:
    split = Split(Replicas(p=["one"], q=["two"]), Replicas(d=[ANSWER, ANSWER]))
    split.computing.connections["p"].is_lost = True
    split.computing.connections["p"].wait_for = first_only(split.computing.connections["p"])
    assert tokens_of(split.answer()) == [7, 8]
    assert split.sources == [("d", "one"), ("d", "two")]
    assert split.generating.calls[0].is_cancelled


def first_only(connection: FakeConnection) -> Any:
    """Return a `wait_for` of a replica that answers its first call, and then no longer answers health checks."""
    wait_for_lost_replica, num_calls = connection.wait_for, 0

    async def wait_for(awaitable: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return await awaitable if num_calls == 1 else await wait_for_lost_replica(awaitable)

    return wait_for


def test_without_prefill_replicas_the_decode_replica_prefills() -> None:
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "in any words", Cause.HOLD_LEASE)
    for computing in (Replicas(), Replicas(p=[LOST]), Replicas(p=[""]), Replicas(p=[full])):
        split = Split(computing, Replicas(d=[ANSWER]))
        parts = split.answer()
        assert (tokens_of(parts), parts[0].usage.cached_tokens) == ([7, 8], 0)
        assert split.sources == [("d", "")]
        assert not split.generating.requests[0][1].HasField("kv_source")


def test_after_three_lost_leases_the_decode_replica_prefills() -> None:
    computing = Replicas(**{name: [name] for name in "pqrs"})
    split = Split(computing, Replicas(d=[[NO_LEASE], [NO_LEASE], [NO_LEASE], ANSWER]))
    assert tokens_of(split.answer()) == [7, 8]
    assert split.sources == [("d", "p"), ("d", "q"), ("d", "r"), ("d", "")]
    assert [name for name, _ in computing.released] == ["p", "q", "r"]


def test_a_completion_that_has_begun_is_not_retried() -> None:
    split = Split(Replicas(p=["lease"]), Replicas(d=[[ANSWER[0], LOST]], e=[ANSWER]))
    with pytest.raises(ReplicaRefusal, match="it was lost in the middle of the response"):
        split.answer()
    assert split.sources == [("d", "lease")]
    assert split.computing.released == [("p", "lease")]


def test_the_text_of_a_refusal_does_not_determine_whether_it_is_retried() -> None:
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "hold_lease: expected at most 9 blocks in held leases, got 9")
    with pytest.raises(ReplicaRefusal, match="hold_lease"):
        Split(Replicas(p=[full]), Replicas(d=[ANSWER])).answer()
    lost = failure(grpc.StatusCode.NOT_FOUND, "kv_source: lease_id: expected a lease that this tenant holds, got none")
    with pytest.raises(ReplicaRefusal, match="kv_source"):
        Split(Replicas(p=["one"], q=["two"]), Replicas(d=[[lost], ANSWER])).answer()


@pytest.mark.parametrize("step", ["prefill", "generate"])
def test_refusals_are_returned_and_no_lease_stays_held(step: str) -> None:
    refused = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: expected room, got none")
    computing = Replicas(p=[refused if step == "prefill" else "lease"])
    split = Split(computing, Replicas(d=[[refused]]))
    with pytest.raises(ReplicaRefusal) as refusal:
        split.answer()
    assert (refusal.value.code, refusal.value.trailing) == (grpc.StatusCode.RESOURCE_EXHAUSTED, (("a", "b"),))
    assert computing.released == ([] if step == "prefill" else [("p", "lease")])


def test_a_client_that_cancels_releases_the_lease() -> None:
    split = Split(Replicas(p=["lease"]), Replicas(d=[ANSWER]))

    async def cancel_after_first_part() -> None:
        parts = split.parts()
        await anext(parts)
        await parts.aclose()
        await split.disaggregated.finish()

    asyncio.run(cancel_after_first_part())
    assert (split.computing.released, split.generating.calls[0].is_cancelled) == ([("p", "lease")], True)


@pytest.mark.parametrize("change", ["read_cache", "write_cache", "prompt_logprobs"])
def test_a_prompt_whose_kv_cannot_be_fetched_is_computed_by_the_decode_replica(change: str) -> None:
    request = GenerateRequest()
    request.CopyFrom(REQUEST)
    if change == "prompt_logprobs":
        request.prompt_logprobs = 0
    else:
        setattr(request.prefill, change, False)
    split = Split(Replicas(p=[]), Replicas(d=[ANSWER]))
    assert tokens_of(split.answer(request)) == [7, 8]
    assert (split.computing.requests, split.sources) == ([], [("d", "")])


COMPUTED = PrefillResponse(
    usage=Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5, written_tokens=5, device_tokens=3, disk_tokens=1),
    miss_reason=DIVERGED,
    timing=Timing(queue_us=1, prefill_us=20, total_us=30),
)


def decoded_part(**fields) -> GenerateResponse:
    """Return a response of the decode replica, which fetched 8 of 9 prompt tokens and generated 2."""
    usage = Usage(prompt_tokens=9, cached_tokens=8, computed_tokens=1, generated_tokens=2, remote_tokens=8)
    usage.written_tokens = 3
    timing = Timing(queue_us=3, prefill_us=4, total_us=500, decode_us=6)
    return GenerateResponse(usage=usage, timing=timing, miss_reason=NONE, **fields)


def test_usage_combines_the_prompt_and_the_completion_of_both_replicas() -> None:
    response = with_prefill_usage(decoded_part(finished=True), COMPUTED)
    expected = Usage()
    expected.CopyFrom(COMPUTED.usage)
    expected.generated_tokens = 2
    expected.written_tokens = 5 + 3
    assert response.usage == expected
    assert response.usage.remote_tokens == 0
    assert response.miss_reason == DIVERGED
    # The decode replica's time in the queue counts as part of the prefill.
    assert response.timing == Timing(queue_us=1, prefill_us=20 + 3 + 4, total_us=30 + 500, decode_us=6)
    unfinished = with_prefill_usage(decoded_part(), COMPUTED)
    assert unfinished.timing == decoded_part().timing, "only the last message has the times of both replicas"


def test_the_replica_that_computes_a_prompt_explains_it() -> None:
    request = GenerateRequest(prefill=PrefillRequest(token_ids=[1, 2, 3], tenant="acme", explain=True))
    split = Split(Replicas(p=["lease"]), Replicas(d=[ANSWER]))
    split.computing.explanation = ExplainResponse(prompt_tokens=3, left_at_token=1)
    parts = split.answer(request)
    assert [part.HasField("explanation") for part in parts] == [True, False]
    assert parts[0].explanation.left_at_token == 1
    ((_, computed),) = split.computing.requests
    ((_, generated),) = split.generating.requests
    assert (computed.explain, generated.prefill.explain) == (True, False)


def test_further_answers_and_parts_without_usage_stay_as_they_are() -> None:
    second_answer = decoded_part(index=1, finished=True)
    assert with_prefill_usage(decoded_part(index=1, finished=True), COMPUTED) == second_answer
    assert with_prefill_usage(decoded_part(finished=True), None) == decoded_part(finished=True)
    assert with_prefill_usage(GenerateResponse(token_ids=[1]), COMPUTED) == GenerateResponse(token_ids=[1])
