"""Generation over gRPC: streaming, refusals, and the ends of streams."""

import asyncio
import concurrent.futures
import dataclasses

import grpc
import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.errors import OutOfBlocks, StepFailed
from radixkv.service.client import AsyncClient, Client
from radixkv.service.structured.grammars import Grammars
from radixkv.v1.prefill_pb2 import COLD, LENGTH, STOP, GenerateRequest
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine, continuation
from tests.service.serving import becomes_true, deadline_refusal, serve_and_call, serving


def run_with_client(talk, engine=None):
    """Return the result of `talk(client, engine)` with a running server."""
    engine = FakeEngine() if engine is None else engine

    async def run():
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            return await talk(client, engine)

    return asyncio.run(run())


async def read(stream):
    return [answer async for answer in stream]


async def refusal_of(stream):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stream)
    return caught.value


def test_every_field_of_a_generation_reaches_the_engine():
    async def talk(client, engine):
        await read(
            client.generate(
                [1, 2, 3],
                max_new_tokens=5,
                temperature=0.5,
                top_p=0.25,
                seed=2**64 - 1,
                stop_token_ids=[7, 8],
                ignore_eos=True,
                top_k=9,
                min_p=0.125,
                repetition_penalty=1.5,
                presence_penalty=-0.5,
                frequency_penalty=0.75,
                min_tokens=4,
                logit_bias={8: -1.5, 3: 2.0},
                logprobs=7,
                tenant="ten",
                adapter="ada",
                salt="sal",
                request_id="req",
                read_cache=False,
                write_cache=False,
                retention=Retention(80),
                urgency=0,
            )
        )
        return engine.params[0], engine.samplings[0]

    params, sampling = run_with_client(talk)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.25)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos) == (2**64 - 1, {7, 8}, True)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (9, 0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (-0.5, 0.75, 4)
    assert (sampling.logit_bias, sampling.logprobs) == (((3, 2.0), (8, -1.5)), 7)
    assert (params.caller, params.request_id) == (Caller("ten", "ada", "sal"), "req")
    assert (params.read_cache, params.write_cache, params.urgency) == (False, False, 0)
    assert params.retention == Retention(80)


def test_the_defaults_are_greedy_decoding_and_sixteen_tokens():
    async def talk(client, engine):
        await read(client.generate([1]))
        await read(client.generate([1]))
        return engine.params[0], engine.samplings

    params, (first, second) = run_with_client(talk)
    assert (first.max_new_tokens, first.temperature, first.top_p, first.ignore_eos) == (16, 0.0, 1.0, False)
    assert first.stop_token_ids == frozenset()
    assert first.takes_most_likely
    assert first == dataclasses.replace(Sampling(), seed=first.seed)
    assert first.seed != second.seed
    assert params.urgency == 50


def test_each_token_has_its_log_probabilities():
    async def talk(client, _):
        with_logprobs = [await read(client.generate([1], max_new_tokens=9, logprobs=count)) for count in (0, 2)]
        return [*with_logprobs, await read(client.generate([1], max_new_tokens=9))]

    without_top, with_two_top, without_logprobs = run_with_client(talk)
    for answers in (without_top, with_two_top):
        received = [(token_id, each.logprob) for answer in answers for token_id, each in pairs(answer)]
        assert received == [(token_id, -token_id) for token_id in continuation([1], 9)]
    assert {len(each.top) for answer in without_top for each in answer.logprobs} == {0}
    top_ids = [tuple(top.token_id for top in each.top) for answer in with_two_top for each in answer.logprobs]
    assert top_ids == [(token_id, token_id) for token_id in continuation([1], 9)]
    assert not any(answer.logprobs for answer in without_logprobs)


@pytest.mark.parametrize("max_new_tokens", [1, 3])
@pytest.mark.parametrize("count", [0, 2])
def test_log_probabilities_of_the_prompt_are_sent_once(max_new_tokens, count):
    async def talk(client, engine):
        answers = await read(client.generate([1, 2, 3], max_new_tokens=max_new_tokens, prompt_logprobs=count, n=2))
        return answers, [sampling.prompt_logprobs for sampling in engine.samplings]

    answers, requested = run_with_client(talk)
    assert requested == [count, None]
    (with_prompt,) = [answer for answer in answers if answer.prompt_logprobs]
    assert with_prompt.index == 0
    assert with_prompt.HasField("usage")
    assert [each.logprob for each in with_prompt.prompt_logprobs] == [-2.0, -3.0]
    assert [len(each.top) for each in with_prompt.prompt_logprobs] == [count, count]


def test_a_large_number_of_log_probabilities_of_the_prompt_arrives_too():
    prompt = [1 + number % 200 for number in range(700)]

    async def talk(client, _):
        return await read(client.generate(prompt, max_new_tokens=2, prompt_logprobs=3, logprobs=1, request_id="r"))

    answers = run_with_client(talk)
    (first,) = [answer for answer in answers if answer.prompt_logprobs]
    assert first is answers[0]
    assert [each.logprob for each in first.prompt_logprobs] == [-float(token_id) for token_id in prompt[1:]]
    assert {len(each.top) for each in first.prompt_logprobs} == {3}
    assert (first.request_id, first.usage.prompt_tokens, len(first.logprobs)) == ("r", 700, len(first.token_ids))


def test_wrong_counts_of_log_probabilities_are_refused_by_name():
    async def talk(client, _):
        for name in ("logprobs", "prompt_logprobs"):
            refusal = await refusal_of(client.generate([1], **{name: 101}))
            assert refusal.details() == f"{name}: expected 0 to 100, got 101"
        return True

    assert run_with_client(talk)


def pairs(answer):
    """Return the token ids of a response, each with its log probabilities."""
    return zip(answer.token_ids, answer.logprobs, strict=True)


def test_grammars_are_compiled_for_each_tenant(monkeypatch):
    compiled = []
    monkeypatch.setattr(Grammars, "_load_vocabulary", lambda *_: "read")
    monkeypatch.setattr(Grammars, "_compile", lambda _, text, __: compiled.append(text.text))

    async def talk(client, _):
        for tenant in ("mine", "others", "mine"):
            await read(client.generate([1], regex="a+", tenant=tenant))

    run_with_client(talk)
    assert compiled == ["a+"] * 2


def test_completions_of_one_prompt_are_distinguished_and_sample_with_seeds_of_their_own():
    async def talk(client, engine):
        answers = await read(client.generate([1, 2], max_new_tokens=6, n=3, seed=2**64 - 2, request_id="r"))
        return answers, [sampling.seed for sampling in engine.samplings]

    answers, seeds = run_with_client(talk)
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    for index in range(3):
        own = [answer for answer in answers if answer.index == index]
        assert [token_id for answer in own for token_id in answer.token_ids] == continuation([1, 2], 6)
        assert [answer.finished for answer in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].usage.generated_tokens == 6
        assert {answer.request_id for answer in own} == {"r"}
    assert {answer.index for answer in answers} == {0, 1, 2}


@pytest.mark.parametrize(
    "compression",
    [
        None,
        Compression(CompressionPolicy.STREAMING_LLM, 64, num_sinks=0),
        Compression(CompressionPolicy.H2O, 64, window=9),
        Compression(CompressionPolicy.SNAPKV, 64),
    ],
)
def test_a_compression_reaches_the_engine_as_requested(compression):
    async def talk(client, engine):
        await read(client.generate([1], compression=compression))
        return engine.samplings

    assert [sampling.compression for sampling in run_with_client(talk)] == [compression]


def test_a_compression_without_a_known_policy_is_refused():
    async def talk(client, engine):
        call = PrefillServiceStub(client._channel).Generate
        requests = [GenerateRequest(compression=compression) for compression in ({"max_tokens": 9}, {"policy": 9})]
        return [await refusal_of(call(request)) for request in requests], engine.samplings

    errors, samplings = run_with_client(talk)
    for error, got in zip(errors, (0, 9), strict=True):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        expected = "compression.policy: expected one of STREAMING_LLM, H2O, SNAPKV, got"
        assert error.details() == f"{expected} {got}"
    assert not samplings


@pytest.mark.parametrize(("n", "message"), [(0, "n: expected 1 to 64, got 0"), (65, "n: expected 1 to 64, got 65")])
def test_a_number_of_answers_out_of_range_is_refused(n, message):
    async def talk(client, engine):
        return await refusal_of(client.generate([1], n=n)), engine.samplings

    error, samplings = run_with_client(talk)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)
    assert not samplings


def test_a_caller_that_disconnects_cancels_all_its_completions():
    async def talk(client, engine):
        stream = client.generate([1], max_new_tokens=50, n=4)
        await anext(stream)
        await stream.aclose()
        return await becomes_true(lambda: [future.cancelled() for future in engine.futures] == [True] * 4)

    assert run_with_client(talk, FakeEngine(is_gated=True))


def test_each_token_is_sent_once_and_in_order_and_the_last_response_has_the_finish_reason():
    async def talk(client, _):
        return await read(client.generate([1, 2, 3], max_new_tokens=40, request_id="mine", retention=Retention(80)))

    answers = run_with_client(talk)
    assert [token for answer in answers for token in answer.token_ids] == continuation([1, 2, 3], 40)
    assert {answer.request_id for answer in answers} == {"mine"}
    assert [answer.finished for answer in answers] == [False] * (len(answers) - 1) + [True]
    first, last = answers[0], answers[-1]
    assert first.usage.prompt_tokens == 3
    assert (last.usage.prompt_tokens, last.usage.generated_tokens) == (3, 40)
    assert (last.finish_reason, last.miss_reason) == (LENGTH, COLD)
    assert (last.timing.queue_us, last.timing.prefill_us, last.timing.decode_us, last.timing.total_us) == (1, 2, 3, 6)
    assert last.retained.granted_tokens == 3
    assert not any(answer.HasField("timing") or answer.HasField("retained") for answer in answers[:-1])


def test_tokens_are_sent_before_the_generation_ends():
    async def talk(client, engine):
        stream = client.generate([1, 2], max_new_tokens=5)
        received = []
        while len(received) < 4:
            answer = await anext(stream)
            received += answer.token_ids
        assert not engine.futures[0].done()
        engine.open_gate()
        later = await read(stream)
        return received, later

    received, later = run_with_client(talk, FakeEngine(is_gated=True))
    assert received == continuation([1, 2], 4)
    assert [token for answer in later for token in answer.token_ids] == continuation([1, 2], 5)[4:]
    assert later[-1].finished


def test_a_stop_token_ends_a_generation():
    expected = continuation([1, 2, 3], 10)
    end = expected.index(expected[4]) + 1  # the stop token may occur earlier

    async def talk(client, _):
        return await read(client.generate([1, 2, 3], max_new_tokens=10, stop_token_ids=[expected[4]]))

    answers = run_with_client(talk)
    assert [token for answer in answers for token in answer.token_ids] == expected[:end]
    assert answers[-1].finish_reason == STOP


def test_one_token_is_one_response():
    async def talk(client, _):
        return await read(client.generate([1], max_new_tokens=1))

    (answer,) = run_with_client(talk)
    assert answer.finished
    assert answer.HasField("usage")
    assert list(answer.token_ids) == [1]


def test_a_refusal_and_a_failure_have_their_statuses():
    async def talk(client, engine):
        engine.refusal = OutOfBlocks("blocks: expected 2 more, got 1", retry_after_s=0.25)
        refused = await refusal_of(client.generate([1]))
        engine.refusal, engine.failure = None, StepFailed("step: it failed")
        failed = await refusal_of(client.generate([1], max_new_tokens=3))
        engine.failure = KeyError("a secret")
        secret = await refusal_of(client.generate([1]))
        engine.failure = None
        wrong = await refusal_of(client.generate([1], max_new_tokens=0))
        long = await refusal_of(client.generate([1] * 3, tenant="t" * 257))
        assert (await read(client.generate([1])))[-1].finished
        return refused, failed, secret, wrong, long

    refused, failed, secret, wrong, long = run_with_client(talk)
    assert (refused.code(), dict(tuple(refused.trailing_metadata()))["retry-after-ms"]) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "250",
    )
    assert (failed.code(), failed.details()) == (grpc.StatusCode.INTERNAL, "step: it failed")
    assert secret.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in secret.details()
    assert (wrong.code(), wrong.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_new_tokens: expected at least 1, got 0",
    )
    assert long.details() == "tenant: expected at most 256 characters, got 257"


def test_a_caller_that_disconnects_cancels_its_generation():
    async def talk(client, engine):
        stream = client.generate([1], max_new_tokens=3)
        await anext(stream)
        await stream.aclose()
        return await becomes_true(engine.futures[0].cancelled)

    assert run_with_client(talk, FakeEngine(is_gated=True))


def test_a_deadline_ends_a_generation():
    async def talk(client, engine):
        refused = await deadline_refusal(
            engine, lambda timeout_s: read(client.generate([1], max_new_tokens=3, timeout_s=timeout_s))
        )
        return refused.code(), await becomes_true(engine.futures[0].cancelled)

    assert run_with_client(talk, FakeEngine(is_gated=True)) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


def test_requests_that_the_engine_cancels_are_unavailable():
    async def talk(client, engine):
        call = asyncio.create_task(refusal_of(client.generate([1], max_new_tokens=3)))
        assert await becomes_true(lambda: len(engine.futures) == 1)
        engine.futures[0].cancel()
        return await call

    refusal = run_with_client(talk, FakeEngine(is_gated=True))
    assert (refusal.code(), refusal.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "engine: stopped before the answer was known",
    )


def test_a_caller_that_reads_slowly_gets_all_tokens_in_fewer_answers():
    async def talk(client, engine):
        stream = client.generate([1], max_new_tokens=2000)
        first = await anext(stream)
        assert await becomes_true(engine.futures[0].done)
        return [first, *await read(stream)]

    answers = run_with_client(talk)
    assert [token for answer in answers for token in answer.token_ids] == continuation([1], 2000)
    assert len(answers) < 2000


def test_the_blocking_client_generates_and_closing_a_stream_cancels_the_generation():
    engine = FakeEngine()

    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            answers = list(client.generate([1, 2], max_new_tokens=6))
            engine.is_gated = True
            stream = client.generate([3], max_new_tokens=2)
            next(stream)
            stream.close()
            concurrent.futures.wait(engine.futures, PATIENCE_S)
            return answers, engine.futures[1].cancelled()

    answers, was_cancelled = serve_and_call(engine, talk)
    assert [token for answer in answers for token in answer.token_ids] == continuation([1, 2], 6)
    assert was_cancelled


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"seed": -1}, ValueError, "seed: expected a whole number from 0 to 2**64 - 1, got -1"),
        ({"seed": 2**64}, ValueError, f"seed: expected a whole number from 0 to 2**64 - 1, got {2**64}"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected a whole number from 0 to 2**32 - 1, got -1"),
        ({"stop_token_ids": [2**32]}, ValueError, "stop_token_ids: expected a sequence of which each item is a whole"),
        ({"urgency": -1}, ValueError, "urgency: expected a whole number from 0 to 2**32 - 1, got -1"),
        ({"temperature": "hot"}, TypeError, "temperature: expected a number, got 'hot'"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos: expected true or false, got 'no'"),
        ({"tenant": 5}, TypeError, "tenant: expected text in UTF-8, got 5"),
        ({"tenant": "\ud800"}, ValueError, "tenant: expected text in UTF-8, got '\\ud800'"),
        ({"retention": 5}, TypeError, "retention: expected a Retention, got 5"),
        ({"retention": Retention(60, ttl_s="5")}, ValueError, "retention.ttl_s: expected more than 0 and at most"),
        ({"timeout_s": "soon"}, ValueError, "timeout_s: expected more than 0 and less than"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name_before_anything_is_sent(fields, kind, message):
    with Client("127.0.0.1:1") as client, pytest.raises(kind) as refused:
        client.generate([1], **fields)
    assert str(refused.value).startswith(message)


def test_only_the_call_of_a_client_that_does_not_read_its_log_probabilities_is_cancelled():
    async def run():
        engine = FakeEngine()
        async with serving(engine, max_held_bytes=10**6) as (server, address):
            # Without the probe, a connection buffers only 64 KiB for a caller that does not read.
            options = (("grpc.http2.bdp_probe", 0),)
            async with AsyncClient(address, options=options) as client, AsyncClient(address) as other:
                unread = client.generate([1], max_new_tokens=100_000, logprobs=100, tenant="busy", n=2)
                assert await becomes_true(lambda: [each.cancelled() for each in engine.futures] == [True] * 2)
                assert server.receiver.held_bytes.used < 2 * 10**6
                received = await read(other.generate([1], max_new_tokens=40, logprobs=100, tenant="other"))
                refusal = await refusal_of(unread)
            assert await becomes_true(lambda: server.receiver.held_bytes.used == 0)
            return refusal, received

    refusal, received = asyncio.run(run())
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes of requests and unsent responses for this tenant" in refusal.details()
    assert sum(len(answer.logprobs) for answer in received) == 40
