import asyncio
import struct
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from radixkv.api.caller import Caller
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.config import ServerConfig, TransferConfig
from radixkv.service.client import AsyncClient, logits_of
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import FairShares
from radixkv.service.server.servicers.explanations import Explainer
from radixkv.service.server.servicers.prefill import PrefillServicer
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.structured.grammars import Grammars
from radixkv.v1.cache_pb2 import RetainRequest
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.prefill_pb2 import COLD, DIVERGED, NONE, READ_DISABLED, GenerateRequest, PrefillRequest, PrefillResponse
from radixkv.v1.prefill_pb2 import MissReason as MissReasonMessage
from radixkv.v1.prefill_pb2 import Retention as RetentionMessage
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.patience import PATIENCE_S
from tests.service.fake_engine import LIMITS, VOCAB_SIZE, FakeEngine
from tests.service.serving import becomes_true, deadline_refusal, refusal_of, serving


def run_with_client(talk, engine=None, **config):
    """Return the result of `talk(client, engine)` with a running server."""
    engine = FakeEngine() if engine is None else engine

    async def run():
        async with serving(engine, **config) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            return await talk(client, engine)

    return asyncio.run(run())


def test_every_field_of_a_request_reaches_the_engine():
    async def talk(client, engine):
        await client.prefill(
            [1, 2, 3],
            tenant="ten",
            adapter="ada",
            salt="sal",
            request_id="req",
            read_cache=False,
            write_cache=False,
            top_logprobs=4,
            return_logits=True,
            hold_lease=True,
            retention=Retention(80, 1.5, 1, 2),
        )
        return engine.params[0]

    params = run_with_client(talk)
    assert params.tokens == struct.pack("<3I", 1, 2, 3)
    assert (params.caller, params.request_id) == (Caller("ten", "ada", "sal"), "req")
    assert (params.read_cache, params.write_cache) == (False, False)
    assert (params.top_logprobs, params.return_logits, params.hold_lease) == (4, True, True)
    assert params.retention == Retention(80, 1.5, 1, 2)


def test_the_cache_is_read_and_written_unless_the_request_says_no():
    async def talk(client, engine):
        call = client._channel.unary_unary(
            "/radixkv.v1.PrefillService/Prefill",
            request_serializer=PrefillRequest.SerializeToString,
            response_deserializer=PrefillResponse.FromString,
        )
        await call(PrefillRequest(token_ids=[1]))
        return engine.params[0]

    params = run_with_client(talk)
    assert (params.read_cache, params.write_cache) == (True, True)
    assert params.caller == Caller()
    assert (params.top_logprobs, params.return_logits, params.hold_lease) == (0, False, False)
    assert params.retention is None


def test_a_request_id_is_generated_if_absent_and_otherwise_returned():
    async def talk(client, engine):
        return [(await client.prefill([1], request_id=name)).request_id for name in ("", "", "mine")]

    first, second, mine = run_with_client(talk)
    assert first
    assert second
    assert first != second
    assert mine == "mine"


def test_a_response_has_everything_that_the_engine_returned():
    async def talk(client, engine):
        await client.prefill([1, 2, 3])
        return await client.prefill([1, 2, 4, 5], top_logprobs=2, return_logits=True)

    answer = run_with_client(talk)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.written_tokens) == (4, 2, 2, 2)
    assert answer.next_token_id == 12
    assert [(top.token_id, top.logprob) for top in answer.top_logprobs] == [(0, 0.0), (1, -1.0)]
    assert logits_of(answer).shape == (VOCAB_SIZE,)
    assert int(np.argmax(logits_of(answer))) == 12
    assert answer.miss_reason == DIVERGED
    assert (answer.timing.queue_us, answer.timing.prefill_us, answer.timing.total_us) == (1, 2, 3)


def test_every_miss_reason_has_its_name_on_the_wire():
    assert {reason.value for reason in MissReason} == set(MissReasonMessage.keys())


def test_miss_reasons_keep_their_names():
    async def talk(client, engine):
        reasons = [(await client.prefill([1, 2])).miss_reason for _ in range(2)]
        return [*reasons, (await client.prefill([1, 2], read_cache=False)).miss_reason]

    assert run_with_client(talk) == [COLD, NONE, READ_DISABLED]


def test_lease_fields_are_set_only_when_a_lease_is_held():
    async def talk(client, engine):
        return [
            await client.prefill(range(40)),
            await client.prefill(range(40), hold_lease=True),
            await client.prefill(range(40), hold_lease=True, return_block_table=True),
        ]

    before_s = time.time()
    plain, held, described = run_with_client(talk)
    assert not plain.HasField("lease_expires_at")
    assert (plain.lease_id, list(plain.block_table), plain.block_size, plain.epoch) == ("", [], 0, 0)
    assert held.lease_id == "lease-0"
    assert list(held.block_table) == []
    assert list(described.block_table) == [0, 1, 2]
    assert (held.block_size, held.epoch) == (LIMITS.block_size, LIMITS.epoch)
    assert before_s + 59 < held.lease_expires_at.ToNanoseconds() / 1e9 < time.time() + 61


def test_a_lease_is_released_once_and_only_by_its_tenant():
    async def talk(client, engine):
        lease_id = (await client.prefill([1], tenant="a", hold_lease=True)).lease_id
        other = await refusal_of(client.release(lease_id, tenant="b"))
        await client.release(lease_id, tenant="a")
        again = await refusal_of(client.release(lease_id, tenant="a"))
        return other.code(), again.code()

    assert run_with_client(talk) == (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND)


def test_a_lease_is_renewed_only_by_its_tenant_and_while_it_is_held():
    async def talk(client, engine):
        lease_id = (await client.prefill([1], tenant="a", hold_lease=True)).lease_id
        other = await refusal_of(client.renew(lease_id, tenant="b"))
        renewed = await client.renew(lease_id, tenant="a")
        await client.release(lease_id, tenant="a")
        again = await refusal_of(client.renew(lease_id, tenant="a"))
        return renewed.lease_expires_at.ToNanoseconds(), other.code(), again.code()

    not_found = grpc.StatusCode.NOT_FOUND
    assert run_with_client(talk) == (1_800_000_000_000_000_000, not_found, not_found)


def test_probe_says_what_would_be_reused():
    async def talk(client, engine):
        await client.prefill([1, 2, 3], tenant="a", salt="s")
        return [await client.probe([1, 2, 9], tenant="a", salt=salt) for salt in ("s", "t")]

    hit, miss = run_with_client(talk)
    assert (hit.cached_tokens, hit.prompt_tokens, hit.miss_reason) == (2, 3, NONE)
    assert (miss.cached_tokens, miss.prompt_tokens, miss.miss_reason) == (0, 3, COLD)


def test_stats_have_everything_that_the_engine_returned():
    async def talk(client, engine):
        await client.prefill([1], hold_lease=True)
        return await client.stats()

    stats = run_with_client(talk)
    assert (stats.model, stats.device, stats.epoch, stats.uptime_s) == ("fake", "cpu", 2**53 + 1, 1.5)
    blocks, requests, tokens = stats.blocks, stats.requests, stats.tokens
    assert (blocks.total, blocks.free, blocks.leased, blocks.published, blocks.pinned) == (10, 5, 2, 3, 1)
    assert (blocks.retained, blocks.retainable, blocks.on_probation) == (2, 4, 3)
    assert [tenant.retained_blocks for tenant in stats.tenants] == [2, 0]
    assert (requests.waiting, requests.running) == (0, 0)
    assert (requests.finished, requests.failed, requests.cancelled) == (7, 8, 9)
    assert (tokens.prompt, tokens.cached, tokens.computed, tokens.written) == (100, 60, 40, 30)
    assert (stats.namespaces, stats.segments, stats.held_leases) == (1, 11, 1)
    assert (stats.evicted_probation_blocks, stats.evicted_blocks) == (2**53, 2**53 + 1)
    assert (stats.block_bytes, stats.block_size) == (4096, 16)
    states = stats.states
    counts = (states.snapshots, states.max_snapshots, states.given_up_snapshots, states.recomputed_tokens)
    assert counts == (3, 4, 5, 6)
    parts = stats.parts
    assert (parts.free, parts.needed, parts.kept) == (7, 8, 9)
    assert (parts.given_up, parts.shortened_hits, parts.lost_tokens) == (10, 11, 12)
    assert (stats.kv_dtype, stats.model_fingerprint) == ("int8", "fake fingerprint")


def test_the_grant_is_in_the_response():
    async def talk(client, engine):
        return (
            await client.prefill([1]),
            await client.prefill([1], retention=Retention(80)),
            await client.prefill([1], retention=Retention(80, ttl_s=60)),
        )

    before_s = time.time()
    without, lasting, ending = run_with_client(talk)
    assert not without.HasField("retained")
    granted = lasting.retained
    assert (granted.granted_tokens, granted.refused_tokens, granted.uncached_tokens) == (3, 2, 1)
    assert not granted.HasField("expires_at")
    assert before_s + 59 < ending.retained.expires_at.ToNanoseconds() / 1e9 < time.time() + 61


def test_retain_reaches_the_engine():
    async def talk(client, engine):
        answer = await client.retain([1, 2, 3], Retention(0, 0.25, 1), tenant="t", salt="s")
        return answer.retained, engine.retentions

    retained, calls = run_with_client(talk)
    assert (retained.granted_tokens, retained.refused_tokens, retained.uncached_tokens) == (3, 2, 1)
    assert calls == [(struct.pack("<3I", 1, 2, 3), Retention(0, 0.25, 1), Caller("t", salt="s"))]


def test_a_retention_without_a_priority_is_refused():
    async def talk(client, engine):
        call = CacheServiceStub(client._channel).Retain
        return [
            (await refusal_of(call(RetainRequest(token_ids=[1])))).details(),
            (await refusal_of(call(RetainRequest(token_ids=[1], retention=RetentionMessage())))).details(),
        ]

    assert run_with_client(talk) == ["retention: it is required", "retention.priority: it is required, 0 to 100"]


@pytest.mark.parametrize("nanos", [-1, 10**9])
def test_an_invalid_duration_is_refused(nanos):
    async def talk(client, engine):
        retention = RetentionMessage(priority=80, ttl=Duration(seconds=1, nanos=nanos))
        retain = CacheServiceStub(client._channel).Retain
        return await refusal_of(retain(RetainRequest(token_ids=[1], retention=retention)))

    refusal = run_with_client(talk)
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.details() == f"retention.ttl.nanos: expected 0 to 999999999, got {nanos}"


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (Retention(-1), "retention.priority: expected a whole number from 0, got -1"),
        (Retention(60.5), "retention.priority: expected a whole number from 0, got 60.5"),
        (Retention(60, start=2**32), "retention.start: expected a whole number from 0, got 4294967296"),
        (Retention(60, end=-1), "retention.end: expected a whole number from 0, got -1"),
        (Retention(60, ttl_s=float("nan")), "retention.ttl_s: expected more than 0"),
    ],
)
def test_a_retention_that_cannot_be_sent_names_its_field(retention, message):
    async def talk(client, engine):
        with pytest.raises(ValueError, match=message):
            await client.prefill([1], retention=retention)
        with pytest.raises(ValueError, match="purge: expected either a tenant"):
            await client.purge()
        return engine.params

    assert run_with_client(talk) == []


def test_an_end_token_of_zero_is_not_the_end_of_the_prompt():
    async def talk(client, engine):
        await client.prefill([1], retention=Retention(80, ttl_s=1.9999999999, end=0))
        return engine.params[0].retention

    assert run_with_client(talk) == Retention(80, ttl_s=2.0, end=0)


def test_purge_distinguishes_any_name_from_the_empty_one():
    async def talk(client, engine):
        answer = await client.purge(everything=True)
        await client.purge(tenant="t", adapter="", salt="s")
        return answer, engine.purges

    answer, calls = run_with_client(talk)
    assert (answer.freed_blocks, answer.pinned_blocks) == (7, 2)
    assert calls == [(None, None, None), ("t", "", "s")]


@pytest.mark.parametrize("field", ["tenant", "adapter", "salt", "request_id"])
def test_names_are_at_most_256_characters(field):
    async def talk(client, engine):
        await client.prefill([1], **{field: "é" * 256})
        return await refusal_of(client.prefill([1], **{field: "é" * 257}))

    refusal = run_with_client(talk)
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.details() == f"{field}: expected at most 256 characters, got 257"


def test_probe_and_release_limit_names_too():
    async def talk(client, engine):
        calls = [
            client.probe([1], tenant="x" * 257),
            client.probe([1], salt="x" * 257),
            client.release("x" * 257),
            client.renew("x" * 257),
            client.release("x", tenant="x" * 257),
        ]
        return [(await refusal_of(call)).code() for call in calls]

    assert run_with_client(talk) == [grpc.StatusCode.INVALID_ARGUMENT] * 5


def test_top_logprobs_are_at_most_100():
    async def talk(client, engine):
        at_limit = await client.prefill([1], top_logprobs=100)
        return len(at_limit.top_logprobs), await refusal_of(client.prefill([1], top_logprobs=101))

    num_at_limit, refusal = run_with_client(talk)
    assert num_at_limit == 100
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.details() == "top_logprobs: expected at most 100, got 101"


def test_the_deadline_reaches_the_engine():
    async def talk(client, engine):
        before_s = time.monotonic()
        await client.prefill([1], timeout_s=1000)
        return engine.params[0].deadline_s - before_s, time.monotonic() - before_s

    deadline_s, took_s = run_with_client(talk)
    assert 999 < deadline_s < 1020 + took_s, "gRPC rounds by a hundredth"


@pytest.mark.parametrize("metadata", [[], [("traceparent", "00-ab-cd-01")], [("other", "x"), ("traceparent", "y")]])
def test_the_callers_span_reaches_the_engine(metadata):
    async def talk(client, engine):
        stub = PrefillServiceStub(client._channel)
        await stub.Prefill(PrefillRequest(token_ids=[1]), metadata=metadata)
        request = GenerateRequest(prefill=PrefillRequest(token_ids=[1]), max_new_tokens=1)
        async for _ in stub.Generate(request, metadata=metadata):
            pass
        return [params.traceparent for params in engine.params]

    assert run_with_client(talk) == [dict(metadata).get("traceparent", "")] * 2


def test_a_deadline_that_passes_cancels_the_request():
    async def talk(client, engine):
        refusal = await deadline_refusal(engine, lambda timeout_s: client.prefill([1], timeout_s=timeout_s))
        assert await becomes_true(engine.futures[0].cancelled)
        return refusal.code()

    assert run_with_client(talk, FakeEngine(is_gated=True)) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_caller_that_cancels_cancels_its_own_request_only():
    async def talk(client, engine):
        calls = [asyncio.create_task(client.prefill([token])) for token in (1, 2)]
        assert await becomes_true(lambda: len(engine.futures) == 2)
        cancelled = next(i for i in (0, 1) if engine.params[i].tokens == struct.pack("<I", 1))
        calls[0].cancel()
        assert await becomes_true(engine.futures[cancelled].cancelled)
        assert not engine.futures[1 - cancelled].done()
        engine.open_gate()
        return (await calls[1]).next_token_id

    assert run_with_client(talk, FakeEngine(is_gated=True)) == 2


def test_a_caller_that_is_killed_cancels_its_request():
    program = "import sys; from radixkv.service.client import Client; Client(sys.argv[1]).prefill([1])"

    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (_, address):
            caller = subprocess.Popen([sys.executable, "-P", "-c", program, address])
            try:
                assert await becomes_true(lambda: len(engine.futures) == 1)
            finally:
                caller.kill()
                await asyncio.to_thread(caller.wait)
            return await becomes_true(engine.futures[0].cancelled)

    assert asyncio.run(run())


def test_a_request_that_the_engine_cancels_is_unavailable():
    async def talk(client, engine):
        call = asyncio.create_task(client.prefill([1]))
        assert await becomes_true(lambda: len(engine.futures) == 1)
        engine.futures[0].cancel()
        return await refusal_of(call)

    refusal = run_with_client(talk, FakeEngine(is_gated=True))
    assert refusal.code() is grpc.StatusCode.UNAVAILABLE
    assert refusal.details() == "engine: stopped before the answer was known"


def test_a_cancelled_handler_ends_cancelled():
    class Context:
        def time_remaining(self):
            return None

        def invocation_metadata(self):
            return ()

    async def run():
        engine = FakeEngine(is_gated=True)
        tokenizer = ModelTokenizer(None)
        shared = SharedParts(
            None,
            tokenizer,
            Grammars(tokenizer, 256, frozenset()),
            Explainer(engine, tokenizer),
            FairShares(10**6, "bytes"),
        )
        servicer = PrefillServicer(engine, shared, ServerConfig())
        handler = asyncio.create_task(servicer.Prefill(PrefillRequest(token_ids=[1]), Context()))
        assert await becomes_true(lambda: len(engine.futures) == 1)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        return await becomes_true(engine.futures[0].cancelled)

    assert asyncio.run(run())


def test_concurrent_calls_get_their_own_answers():
    async def talk(client, engine):
        calls = [asyncio.create_task(client.prefill([n, n], request_id=str(n))) for n in range(100)]
        assert await becomes_true(lambda: len(engine.futures) == 100)
        engine.open_gate()
        return [(answer.request_id, answer.next_token_id) for answer in await asyncio.gather(*calls)]

    assert run_with_client(talk, FakeEngine(is_gated=True)) == [(str(n), 2 * n) for n in range(100)]


def test_a_prompt_of_a_million_ids_is_accepted():
    async def talk(client, engine):
        answer = await client.prefill(np.full(1_000_000, 255, dtype=np.uint32))
        return answer.usage.prompt_tokens, len(engine.params[0].tokens)

    assert run_with_client(talk) == (1_000_000, 4_000_000)


def test_a_message_above_the_limit_is_refused():
    async def talk(client, engine):
        refusal = await refusal_of(client.prefill(np.zeros(1000, dtype=np.uint32)))
        return refusal.code(), (await client.prefill([3])).next_token_id

    assert run_with_client(talk, max_message_bytes=2048) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 3)


def test_stop_tokens_are_counted_before_they_are_validated():
    async def talk(client, engine):
        refusal = await refusal_of(anext(client.generate([3], stop_token_ids=[5] * 1025)))
        return refusal.code(), refusal.details()

    message = "stop_token_ids: expected at most 1024 of them, got 1025"
    assert run_with_client(talk) == (grpc.StatusCode.INVALID_ARGUMENT, message)


def test_an_answer_may_be_larger_than_a_message_that_is_accepted():
    async def talk(client, engine):
        return len((await client.prefill([3], return_logits=True)).logits)

    assert run_with_client(talk, FakeEngine(num_logits=10_000), max_message_bytes=2048) == 40_000


def test_the_engine_validates_prompts():
    async def talk(client, engine):
        return [(await refusal_of(client.prefill(ids))).code() for ids in ([], [VOCAB_SIZE])]

    assert run_with_client(talk) == [grpc.StatusCode.INVALID_ARGUMENT] * 2


def test_each_tenant_is_reported_with_its_bounds():
    stats = run_with_client(lambda client, _: client.stats())
    assert stats.known_tenants == 1234
    first, second = stats.tenants
    assert (first.tenant, first.cached_blocks, first.hit_tokens) == ("a", 3, 60)
    assert not first.HasField("ceiling_blocks")
    assert (second.floor_blocks, second.ceiling_blocks) == (5, 9)


def test_a_lease_is_released_at_once_if_its_response_is_refused():
    async def run():
        engine = FakeEngine()
        async with serving(engine, max_held_bytes=180) as (_, address), AsyncClient(address) as client:
            refusal = await refusal_of(client.prefill([1, 2], hold_lease=True, top_logprobs=20))
            assert len(engine.params) == 1
            assert await becomes_true(lambda: not engine._leases)
            held = await client.prefill([1, 2], hold_lease=True)
            return refusal.code(), list(engine._leases) == [held.lease_id]

    assert asyncio.run(run()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


class BegunFuture(Future):
    """Cannot be cancelled any more, and records whether that was tried."""

    was_cancel_called = False

    def cancel(self):
        self.was_cancel_called = True
        return super().cancel()


class BusyEngine(FakeEngine):
    """Its requests can't be cancelled any more, and are answered by `finish`."""

    def prefill(self, params):
        future = BegunFuture()
        future.set_running_or_notify_cancel()
        self.params.append(params)
        self.futures.append(future)
        return future

    def finish(self):
        answered = Future()
        self._answer(answered, self.params[0])
        self.futures[0].set_result(answered.result())


def test_a_lease_is_released_at_once_if_its_caller_has_disconnected():
    async def run():
        engine, released = BusyEngine(), []
        engine.release = lambda lease_id, caller: released.append((lease_id, caller.tenant))
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            call = asyncio.ensure_future(client.prefill([1, 2], hold_lease=True, tenant="a"))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            # The server has noticed the disconnection.
            assert await becomes_true(lambda: engine.futures[0].was_cancel_called)
            engine.finish()
            assert await becomes_true(lambda: bool(released))
        return released

    assert asyncio.run(run()) == [("lease-0", "a")]


@pytest.mark.parametrize(("role", "refused"), [("both", set()), ("prefill", {"Generate"}), ("decode", {"Prefill"})])
def test_a_server_refuses_the_calls_that_its_role_excludes(role: str, refused: set[str]):
    async def run():
        engine = FakeEngine()
        engine.transfer = SimpleNamespace(config=TransferConfig(role=role), sources={}, fleet=None)
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            calls = {
                "Prefill": client.prefill([1], timeout_s=PATIENCE_S),
                "Generate": anext(client.generate([1], max_new_tokens=1, timeout_s=PATIENCE_S)),
            }
            details = {}
            for name, call in calls.items():
                try:
                    await call
                except grpc.RpcError as error:
                    details[name] = (error.code(), error.details())
            return details

    assert asyncio.run(run()) == {
        name: (
            grpc.StatusCode.UNIMPLEMENTED,
            f"{name}: this server does not offer it, because its transfer.role is {role}",
        )
        for name in refused
    }
