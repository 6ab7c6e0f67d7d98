"""vLLM's engine protocol over a real server and a fake engine."""

import asyncio
import hashlib
import subprocess
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixkv.config import Config
from radixkv.errors import OutOfBlocks, StepFailed
from radixkv.gateway import engine_common_pb2, vllm_engine_pb2
from radixkv.gateway.vllm_engine_pb2 import GenerateRequest, SamplingParams, TokenizedInput
from radixkv.gateway.vllm_engine_pb2_grpc import VllmEngineStub
from radixkv.service.server.model_tokenizer import ModelTokenizer
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine, continuation
from tests.service.serving import becomes_true, deadline_refusal, serving

SERVICE = "vllm.grpc.engine.VllmEngine"


def run_with_server(talk, engine=None, **config):
    """Return the result of `talk(stub, engine, server)` with a running server, whose gateway has the tenant "gate"."""
    engine = FakeEngine() if engine is None else engine
    gateway_config = Config.load(None, ["gateway.enabled=true", "gateway.tenant=gate"])

    async def run():
        async with (
            serving(engine, gateway=gateway_config, **{"model_path": "tiny", **config}) as (server, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub = VllmEngineStub(channel)
            stub.channel = channel
            return await asyncio.wait_for(talk(stub, engine, server), PATIENCE_S)

    return asyncio.run(run())


def request(ids=(1, 2, 3), *, stream=False, request_id="req", **sampling):
    sampling.setdefault("max_tokens", 4)
    return GenerateRequest(
        request_id=request_id,
        tokenized=TokenizedInput(input_ids=ids),
        sampling_params=SamplingParams(**sampling),
        stream=stream,
    )


async def read(call):
    return [response async for response in call]


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read(call) if hasattr(call, "__aiter__") else call)
    return caught.value


def test_an_answer_as_a_whole_is_one_message():
    responses = run_with_server(lambda stub, *_: read(stub.Generate(request())))
    assert [response.WhichOneof("response") for response in responses] == ["complete"]
    complete = responses[0].complete
    assert list(complete.output_ids) == continuation([1, 2, 3], 4)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 4)


def test_a_streamed_completion_has_chunks_of_new_tokens_and_ends_with_the_last_of_them():
    responses = run_with_server(lambda stub, *_: read(stub.Generate(request(stream=True, logprobs=1))))
    *chunks, last = responses
    assert last.WhichOneof("response") == "complete"
    assert {response.WhichOneof("response") for response in chunks} == {"chunk"}
    token_ids = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert token_ids == continuation([1, 2, 3], 4)
    assert sum(response.chunk.completion_tokens for response in chunks) == 4
    assert last.complete.output_ids == chunks[-1].chunk.token_ids
    assert last.complete.output_logprobs == chunks[-1].chunk.output_logprobs
    rows = [row for response in chunks for row in response.chunk.output_logprobs.top_logprobs]
    assert [list(row.token_ids) for row in rows] == [[token_id] for token_id in token_ids]


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_prompt_are_sent_once(stream, max_tokens):
    generation = request(stream=stream, n=2, prompt_logprobs=1, max_tokens=max_tokens)
    responses = run_with_server(lambda stub, *_: read(stub.Generate(generation)))
    messages = [getattr(response, response.WhichOneof("response")) for response in responses]
    (with_prompt,) = [message for message in messages if message.HasField("input_logprobs")]
    assert with_prompt.index == 0
    assert with_prompt is next(message for message in messages if message.index == 0)
    rows = with_prompt.input_logprobs
    assert list(rows.token_ids) == [1, 2, 3]
    first, *others = rows.token_logprobs
    assert not first.HasField("value")
    assert [each.value for each in others] == [-2.0, -3.0]
    assert [list(each.token_ids) for each in rows.top_logprobs] == [[], [2], [3]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_number_of_log_probabilities_of_the_prompt_arrives_too(stream):
    prompt = [1 + number % 200 for number in range(700)]
    generation = request(prompt, stream=stream, prompt_logprobs=3, max_tokens=2)
    first = run_with_server(lambda stub, *_: read(stub.Generate(generation)))[0]
    message = getattr(first, first.WhichOneof("response"))
    rows = message.input_logprobs
    assert list(rows.token_ids) == prompt
    assert [each.value for each in rows.token_logprobs] == [0.0, *(-float(token_id) for token_id in prompt[1:])]
    assert [len(each.values) for each in rows.top_logprobs] == [0, *[3] * 699]
    assert message.prompt_tokens == 700


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_distinguished_by_their_index(stream):
    async def talk(stub, engine, _):
        return await read(stub.Generate(request(n=3, seed=-2, temperature=1.0, stream=stream))), engine.samplings

    responses, samplings = run_with_server(talk)
    completes = [response.complete for response in responses if response.HasField("complete")]
    assert sorted(complete.index for complete in completes) == [0, 1, 2]
    assert [sampling.seed for sampling in samplings] == [2**64 - 2, 2**64 - 1, 0]
    for index in range(3):
        chunks = [each.chunk for each in responses if each.HasField("chunk") and each.chunk.index == index]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert token_ids == (continuation([1, 2, 3], 4) if stream else [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_the_answer_and_is_named(stream):
    stop = continuation([1, 2, 3], 2)[-1]
    last = run_with_server(lambda stub, *_: read(stub.Generate(request(stop_token_ids=[stop], stream=stream))))[
        -1
    ].complete
    assert (last.finish_reason, last.matched_token_id, last.output_ids[-1]) == ("stop", stop, stop)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(stream, is_gated):
    """A gated engine reports all tokens but the last and then waits, so that only the string can end the answer."""
    token_ids, stop = continuation([1], 7), " @"  # the last two tokens, 32 and 64, are the characters " " and "@"
    generation = request([1], stop=[stop, "no"], max_tokens=500, logprobs=0, stream=stream)
    responses = run_with_server(lambda stub, *_: read(stub.Generate(generation)), FakeEngine(is_gated=is_gated))
    last = responses[-1].complete
    assert (last.finish_reason, last.matched_stop_str) == ("stop", stop)
    if stream:
        assert [token_id for each in responses for token_id in each.chunk.token_ids] == token_ids
        assert sum(each.chunk.completion_tokens for each in responses) == 7
    else:
        assert len(responses) == 1
        assert (list(last.output_ids), last.completion_tokens) == (token_ids, 7)
        assert len(last.output_logprobs.token_logprobs) == 7


@pytest.mark.parametrize("max_tokens", [4, 500])
def test_an_answer_as_a_whole_has_the_log_probabilities_of_all_its_tokens(max_tokens):
    (response,) = run_with_server(lambda stub, *_: read(stub.Generate(request(logprobs=2, max_tokens=max_tokens))))
    logprobs, token_ids = response.complete.output_logprobs, continuation([1, 2, 3], max_tokens)
    assert list(logprobs.token_ids) == token_ids
    assert list(logprobs.token_logprobs) == [-float(token_id) for token_id in token_ids]
    assert [list(row.token_ids) for row in logprobs.top_logprobs] == [[token_id] * 2 for token_id in token_ids]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_much_memory_ends(stream):
    async def talk(stub, engine, server):
        call = stub.Generate(request(logprobs=100, max_tokens=5000, stream=stream, n=2))
        assert await becomes_true(lambda: [each.cancelled() for each in engine.futures] == [True] * 2)
        refusal = await refusal_of(call)
        assert await becomes_true(lambda: server.receiver.held_bytes.used == 0)
        return refusal.code()

    assert run_with_server(talk, max_held_bytes=10**6) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_empty_stop_string_is_refused():
    refusal = run_with_server(lambda stub, *_: refusal_of(stub.Generate(request(stop=[""]))))
    assert (refusal.code(), refusal.details()[:8]) == (grpc.StatusCode.INVALID_ARGUMENT, "stop[0]:")


def test_requests_belong_to_the_gateways_tenant():
    async def talk(stub, engine, _):
        await read(stub.Generate(request()))
        return engine.params[0]

    params = run_with_server(talk)
    assert (params.caller.tenant, params.caller.salt, params.caller.adapter) == ("gate", "", "")
    assert params.request_id == "req"


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_ends_every_answer_of_its_request(stream):
    async def talk(stub, engine, _):
        aborted = asyncio.create_task(read(stub.Generate(request(n=2, stream=stream))))
        other = asyncio.create_task(read(stub.Generate(request(request_id="other"))))
        assert await becomes_true(lambda: len(engine.futures) == 3)
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["req", "unknown"]))
        ends = [response.complete for response in await aborted if response.HasField("complete")]
        assert not other.done()
        engine.is_gated = False
        return ends, await other

    ends, other = run_with_server(talk, FakeEngine(is_gated=True))
    assert sorted(end.index for end in ends) == [0, 1]
    assert {(end.finish_reason, end.prompt_tokens, len(end.output_ids)) for end in ends} == {("abort", 3, 0)}
    assert other[-1].complete.finish_reason == "length"


def test_an_abort_while_the_tokenizer_is_loaded_is_not_forgotten(monkeypatch):
    is_loading, may_go_on, load = threading.Event(), threading.Event(), ModelTokenizer.load

    def slow_load(tokenizer):
        is_loading.set()
        assert may_go_on.wait(PATIENCE_S)
        return load(tokenizer)

    monkeypatch.setattr(ModelTokenizer, "load", slow_load)

    async def talk(stub, *_):
        aborted = asyncio.create_task(read(stub.Generate(request(stop=["never"]))))
        assert await becomes_true(is_loading.is_set)
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["req"]))
        may_go_on.set()
        return await aborted

    (response,) = run_with_server(talk, FakeEngine(is_gated=True))
    assert response.complete.finish_reason == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_that_disconnects_cancels_its_requests(stream):
    async def talk(stub, engine, _):
        call = stub.Generate(request(n=2, stream=stream))
        assert await becomes_true(lambda: len(engine.futures) == 2)
        call.cancel()
        return await becomes_true(lambda: all(future.cancelled() for future in engine.futures))

    assert run_with_server(talk, FakeEngine(is_gated=True))


def test_a_deadline_reaches_the_engine():
    async def talk(stub, engine, _):
        refusal = await deadline_refusal(engine, lambda timeout_s: read(stub.Generate(request(), timeout=timeout_s)))
        return refusal.code(), engine.params[0].deadline_s is not None

    assert run_with_server(talk, FakeEngine(is_gated=True)) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfBlocks("no blocks", retry_after_s=0.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (StepFailed("the step failed"), grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_have_the_statuses_of_the_table(error, code):
    async def talk(stub, engine, _):
        engine.failure = error
        return await refusal_of(stub.Generate(request()))

    refusal = run_with_server(talk)
    assert (refusal.code(), refusal.details()) == (code, str(error))


def test_an_unexpected_error_keeps_its_text_to_itself():
    async def talk(stub, engine, _):
        engine.failure = ValueError("tokens of another caller")
        failed = await refusal_of(stub.Generate(request()))
        engine.failure = None
        return failed, await read(stub.Generate(request()))

    refusal, later = run_with_server(talk)
    assert refusal.code() is grpc.StatusCode.INTERNAL
    assert "another caller" not in refusal.details()
    assert later[-1].complete.finish_reason == "length"


def test_a_refusal_names_the_field():
    refusal = run_with_server(lambda stub, *_: refusal_of(stub.Generate(request(structural_tag="{}"))))
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.details().startswith("structural_tag: radixkv does not support")


@pytest.mark.parametrize("method", ["Embed", "StartProfile", "StopProfile"])
def test_other_methods_are_unimplemented(method):
    refusal = run_with_server(lambda stub, *_: refusal_of(stub.channel.unary_unary(f"/{SERVICE}/{method}")(b"")))
    assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_health_check_reports_the_health_of_the_engine():
    async def talk(stub, engine, _):
        reported = []
        for is_healthy in (True, False):
            engine.is_healthy = is_healthy
            reported.append((await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy)
        return reported

    assert run_with_server(talk) == [True, False]


def test_a_drain_finishes_what_runs_and_refuses_the_rest():
    async def talk(stub, engine, server):
        running = asyncio.create_task(read(stub.Generate(request())))
        assert await becomes_true(lambda: len(engine.futures) == 1)
        draining = asyncio.create_task(server.drain())
        assert await becomes_true(lambda: engine.is_draining)
        refusal = await refusal_of(stub.Generate(request()))
        engine.is_gated = False
        return refusal.code(), (await running)[-1].complete.finish_reason, await draining

    assert run_with_server(talk, FakeEngine(is_gated=True)) == (grpc.StatusCode.UNAVAILABLE, "length", True)


def test_the_health_service_of_grpc_knows_the_service():
    async def talk(stub, *_):
        return await health_pb2_grpc.HealthStub(stub.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))

    assert run_with_server(talk).status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_and_describes_the_service():
    async def ask(stub, **question):
        requests = iter([reflection_pb2.ServerReflectionRequest(**question)])
        return await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(stub.channel).ServerReflectionInfo(requests)))

    async def talk(stub, *_):
        return await ask(stub, list_services=""), await ask(stub, file_containing_symbol=SERVICE)

    listed, described = run_with_server(talk)
    assert SERVICE in {service.name for service in listed.list_services_response.service}
    assert described.file_descriptor_response.file_descriptor_proto


def test_descriptions_come_over_the_wire():
    async def talk(stub, *_):
        return (
            await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()),
            await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()),
            await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["core"])),
        )

    model, server, loads = run_with_server(talk)
    assert (model.served_model_name, list(model.eos_token_ids)) == ("fake", [2, 3])
    assert (server.server_type, server.kv_cache_dtype) == ("radixkv", "int8")
    assert loads.loads[0].token_usage == 0.3  # 2 leased and 1 pinned of 10 blocks


def test_the_tokenizer_is_sent_with_the_digest_of_the_whole_archive_at_the_end():
    chunks = run_with_server(lambda stub, *_: read(stub.GetTokenizer(engine_common_pb2.GetTokenizerRequest())))
    archive = b"".join(chunk.data for chunk in chunks)
    assert archive == ModelTokenizer("tiny").archive()[0]
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]


def test_a_flush_purges_the_gateways_tenant_alone():
    async def talk(stub, engine, _):
        return await stub.FlushCache(engine_common_pb2.FlushCacheRequest(timeout_s=3)), engine.purges

    answer, purges = run_with_server(talk)
    assert purges == [("gate", None, None)]
    assert answer.success
    assert answer.message.startswith("freed 7 blocks; 2 more")


def test_without_the_gateway_its_messages_are_not_loaded():
    program = (
        "import asyncio, sys, radixkv.service.cli.main\n"
        "from radixkv.config import Config\n"
        "from tests.service.fake_engine import FakeEngine\n"
        "from tests.service.serving import serving\n"
        "async def serve():\n    async with serving(FakeEngine(), gateway=Config()):\n        pass\n"
        "asyncio.run(serve())\n"
        "assert not [name for name in sys.modules if name.startswith('radixkv.gateway')]\n"
        "from google.protobuf import descriptor_pool\n"
        "try:\n    descriptor_pool.Default().FindMessageTypeByName('vllm.grpc.engine.SamplingParams')\n"
        "except KeyError:\n    print('not registered')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "not registered\n", done.stderr
