import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import re
import struct
import subprocess
import sys

import grpc
import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.params import PrefillParams
from radixkv.service.client import AsyncClient, Client, logits_of
from radixkv.service.client.connection import channel_options
from radixkv.service.client.requests import WIRE_NAMES, GenerateOptions, PrefillOptions, PromptOptions
from radixkv.v1.cache_pb2 import DESCRIPTOR as CACHE
from radixkv.v1.model_pb2 import DESCRIPTOR as MODEL
from radixkv.v1.prefill_pb2 import DESCRIPTOR as PREFILL
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest, PrefillResponse
from radixkv.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.serving import WITHOUT_ENGINE, becomes_true, serve_and_call, serving


def test_the_blocking_client_offers_every_call():
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            answer = client.prefill([1, 2], tenant="a", hold_lease=True, return_logits=True)
            probe = client.probe([1, 2, 3], tenant="a")
            assert client.renew(answer.lease_id, tenant="a").lease_expires_at.seconds == 1_800_000_000
            client.release(answer.lease_id, tenant="a")
            return answer, probe, client.stats()

    answer, probe, stats = serve_and_call(FakeEngine(), talk)
    assert answer.next_token_id == int(np.argmax(logits_of(answer))) == 3
    assert (probe.cached_tokens, probe.prompt_tokens) == (2, 3)
    assert (stats.model, stats.held_leases) == ("fake", 0)


def test_the_blocking_client_is_shared_between_threads():
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
            return [answer.next_token_id for answer in pool.map(lambda n: client.prefill([n]), range(64))]

    assert serve_and_call(FakeEngine(), talk) == list(range(64))


def test_both_clients_take_the_same_arguments():
    for name in (
        "__init__",
        "prefill",
        "generate",
        "chat",
        "tokenizer",
        "probe",
        "release",
        "renew",
        "stats",
        "health",
        "close",
        "retain",
        "purge",
        "segments",
        "load_adapter",
        "unload_adapter",
        "adapters",
        "drain",
    ):
        blocking = inspect.signature(getattr(Client, name)).parameters
        awaited = inspect.signature(getattr(AsyncClient, name)).parameters
        assert blocking == awaited, name


def test_both_clients_send_the_same_bytes():
    fields = {
        "tenant": "t",
        "adapter": "a",
        "salt": "s",
        "request_id": "r",
        "read_cache": False,
        "write_cache": False,
        "top_logprobs": 1,
        "return_logits": True,
        "hold_lease": True,
    }

    async def run():
        engine = FakeEngine()
        async with serving(engine) as (_, address), AsyncClient(address) as awaited:
            await awaited.prefill([1, 2], timeout_s=PATIENCE_S, **fields)
            with Client(address) as blocking:
                await asyncio.to_thread(blocking.prefill, [1, 2], timeout_s=PATIENCE_S, **fields)
        return engine.params

    first, second = asyncio.run(run())
    caller = Caller(fields.pop("tenant"), fields.pop("adapter"), fields.pop("salt"))
    expected = PrefillParams(struct.pack("<2I", 1, 2), caller, **fields)
    for params in (first, second):
        assert dataclasses.replace(params, deadline_s=None) == expected


@pytest.mark.parametrize(
    ("token_ids", "error_type"),
    [([-1], ValueError), ([2**32], ValueError), ([0.5], TypeError), ([[1], [2]], ValueError)],
)
def test_an_invalid_prompt_is_never_sent(token_ids, error_type):
    def talk(address):
        with Client(address) as client:
            for call in (client.prefill, client.probe):
                with pytest.raises(error_type, match="token_ids: expected"):
                    call(token_ids)

    engine = FakeEngine()
    serve_and_call(engine, talk)
    assert engine.params == []


@pytest.mark.parametrize(("call", "option"), [("prefill", "tennant"), ("prefill", "seed"), ("generate", "hold_lease")])
def test_an_unknown_option_is_refused_by_name(call, option):
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=rf"^{call}\(\) got .* '{option}'$"):
        getattr(client, call)([1], **{option: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urgency": "high"}, "urgency: expected a whole number from 0 to 2**32 - 1, got 'high'"),
        ({"tenant": 7}, "tenant: expected text in UTF-8, got 7"),
        ({"retention": 80}, "retention: expected a Retention, got 80"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name(options, message):
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        client.prefill([1], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"awaits": "rain"}, "awaits: expected a member of its enum, got 'rain'"),
        (
            {"stop_token_ids": [-1]},
            "stop_token_ids: expected a sequence of which each item is a whole number from 0 to 2**32 - 1, got [-1]",
        ),
        ({"logit_bias": {1: "x"}}, "logit_bias: expected a mapping with keys and values of its types, got {1: 'x'}"),
    ],
)
def test_an_option_with_a_wrong_value_is_refused_by_name(options, message):
    with Client("127.0.0.1:1") as client, pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        client.generate([1], **options)


@pytest.mark.parametrize(
    ("compression", "error_type", "message"),
    [
        ("h2o", TypeError, "compression: expected a Compression, got 'h2o'"),
        (
            Compression(CompressionPolicy.H2O, -1),
            ValueError,
            "compression.max_tokens: expected a whole number from 0, got -1",
        ),
        (
            Compression(CompressionPolicy.H2O, 9, window=0.5),
            ValueError,
            "compression.window: expected a whole number from 0, got 0.5",
        ),
        (Compression("lru", 9), ValueError, "'lru' is not a valid CompressionPolicy"),
    ],
)
def test_a_compression_that_can_not_be_sent_is_refused_by_name(compression, error_type, message):
    with Client("127.0.0.1:1") as client, pytest.raises(error_type, match=f"^{re.escape(message)}$"):
        client.generate([1], compression=compression)


def wire_fields(message_type):
    return {field.name for field in message_type.DESCRIPTOR.fields}


def wire_names(options):
    """Return the names that the options of a call have in its message."""
    return {WIRE_NAMES.get(name, name) for name in options.__optional_keys__}


def test_options_are_the_fields_of_the_messages():
    assert wire_names(PrefillOptions) == wire_fields(PrefillRequest) - {"token_ids"}
    assert wire_names(GenerateOptions) - wire_names(PromptOptions) == wire_fields(GenerateRequest) - {"prefill"}
    assert wire_names(PrefillOptions) - wire_names(PromptOptions) == {
        "top_logprobs",
        "return_logits",
        "hold_lease",
        "return_block_table",
    }


def test_a_purge_requires_either_names_or_everything():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"^purge: expected either .* or `everything`, got both$"):
            client.purge(tenant="acme", everything=True)
        with pytest.raises(ValueError, match=r"^purge: expected either .* or `everything`, got none$"):
            client.purge()


def test_an_address_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"^address: expected HOST:PORT, got None$"):
        Client(None)


def test_grpc_errors_pass_through():
    def talk(address):
        with Client(address) as client, pytest.raises(grpc.RpcError) as caught:
            client.prefill([])
        return caught.value.code()

    assert serve_and_call(FakeEngine(), talk) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_default_timeout_holds_for_every_call_and_a_call_may_have_its_own():
    def talk(address):
        with Client(address, timeout_s=1000) as client:
            client.prefill([1])
            client.prefill([1], timeout_s=3000)
            client.prefill([1])

    engine = FakeEngine()
    serve_and_call(engine, talk)
    first, long, last = (params.deadline_s for params in engine.params)
    assert long - first == pytest.approx(2000, abs=100)
    assert last >= first


def test_an_unreachable_server_is_unavailable():
    with Client("127.0.0.1:1", timeout_s=PATIENCE_S) as client, pytest.raises(grpc.RpcError) as caught:
        client.stats()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class Restarting(PrefillServiceServicer):
    """Answers UNAVAILABLE to the first prefills, as a service that restarts, and to every release."""

    def __init__(self, num_refusals):
        self.num_refusals = num_refusals
        self.num_calls = 0

    def Prefill(self, request, context):  # noqa: N802
        self.num_calls += 1
        if self.num_calls <= self.num_refusals:
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        return PrefillResponse(next_token_id=7)

    def Release(self, request, context):  # noqa: N802
        self.num_calls += 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "draining")


@contextlib.contextmanager
def restarting(num_refusals):
    """Yield a servicer and the address where it listens."""
    servicer = Restarting(num_refusals)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(("retries", "num_calls"), [(0, 1), (1, 2), (4, 3)])
def test_unavailable_calls_are_retried_only_with_retries(retries, num_calls):
    with (
        restarting(num_refusals=2) as (servicer, address),
        Client(address, timeout_s=PATIENCE_S, retries=retries) as client,
    ):
        if retries < 2:
            with pytest.raises(grpc.RpcError) as caught:
                client.prefill([1])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            assert client.prefill([1]).next_token_id == 7
    assert servicer.num_calls == num_calls


def test_a_call_with_a_long_prompt_is_retried():
    with (
        restarting(num_refusals=2) as (servicer, address),
        Client(address, timeout_s=PATIENCE_S, retries=4) as client,
    ):
        assert client.prefill([1] * 200_000).next_token_id == 7
    assert servicer.num_calls == 3


def test_the_async_client_retries():
    async def talk(address):
        async with AsyncClient(address, timeout_s=PATIENCE_S, retries=3) as client:
            return (await client.prefill([1])).next_token_id

    with restarting(num_refusals=2) as (_, address):
        assert asyncio.run(talk(address)) == 7


def test_a_release_is_never_retried():
    with restarting(num_refusals=1) as (servicer, address):
        with Client(address, timeout_s=PATIENCE_S, retries=4) as client, pytest.raises(grpc.RpcError):
            client.release("lease")
        assert servicer.num_calls == 1


def test_retries_name_only_calls_that_exist():
    config = json.loads(dict(channel_options((), 2))["grpc.service_config"])
    services = {each.full_name: each for file in (PREFILL, CACHE, MODEL) for each in file.services_by_name.values()}
    retried_methods = config["methodConfig"][0]["name"]
    assert retried_methods
    for name in retried_methods:
        assert name["method"] in services[name["service"]].methods_by_name


@pytest.mark.parametrize("retries", [-1, 5, True, 1.0])
def test_a_number_of_retries_that_grpc_would_not_make_is_refused(retries):
    with pytest.raises(ValueError, match=f"^retries: expected 0 to 4, got {retries}$"):
        Client("127.0.0.1:1", retries=retries)


def test_cancelling_the_awaiting_task_cancels_the_request():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            call = asyncio.create_task(client.prefill([1]))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await becomes_true(engine.futures[0].cancelled)

    assert asyncio.run(run())


def test_closing_the_client_cancels_its_calls_and_closing_again_does_nothing():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (_, address):
            client = AsyncClient(address)
            call = asyncio.create_task(client.prefill([1]))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            await client.close()
            await client.close()
            with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
                await call
            return await becomes_true(engine.futures[0].cancelled)

    assert asyncio.run(run())


def test_channel_options_of_the_caller_override_the_defaults():
    def talk(address):
        with Client(address, options=[("grpc.max_send_message_length", 100)]) as client:
            with pytest.raises(grpc.RpcError) as caught:
                client.prefill([1] * 100)
            return caught.value.code()

    assert serve_and_call(FakeEngine(), talk) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_logits_are_little_endian_float32():
    assert logits_of(PrefillResponse(logits=struct.pack("<2f", 1.5, -2.0))).tolist() == [1.5, -2.0]
    assert logits_of(PrefillResponse()).shape == (0,)


def test_an_answer_above_grpcs_default_limit_arrives():
    def talk(address):
        with Client(address) as client:
            return logits_of(client.prefill([1], return_logits=True)).nbytes

    assert serve_and_call(FakeEngine(num_logits=2_000_000), talk) == 8_000_000


def test_the_client_works_where_the_engine_is_not_installed():
    program = WITHOUT_ENGINE + (
        "from radixkv.service.client import AsyncClient, Client, Retention, logits_of\n"
        "with Client(sys.argv[1]) as client: print(client.prefill([1, 2]).next_token_id)\n"
        "engine_packages = {f'radixkv.{package}' for package in ('cache', 'scheduling', 'engine', 'startup')}\n"
        "assert not (engine_packages | {'torch'}) & set(sys.modules)\n"
    )

    def talk(address):
        return subprocess.run(
            [sys.executable, "-P", "-c", program, address],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    completed = serve_and_call(FakeEngine(), talk)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "3\n", "")


def test_a_token_is_sent_with_every_call_with_or_without_a_prefix_key():
    class HeaderNames(PrefillServiceServicer):
        """Answers with the names of the headers that it received, as the request id."""

        async def Prefill(self, request, context):  # noqa: N802
            names = {"authorization", "x-prefix-key"}
            received = sorted(name for name, _ in context.invocation_metadata() if name in names)
            return PrefillResponse(request_id=",".join(received))

    async def run():
        server = grpc.aio.server()
        add_PrefillServiceServicer_to_server(HeaderNames(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            answers = []
            for options in ({"token": "t"}, {"token": "t", "prefix_key_tokens": 4}, {"prefix_key_tokens": 4}):
                async with AsyncClient(address, timeout_s=PATIENCE_S, **options) as client:
                    answers.append((await client.prefill([1, 2])).request_id)
            return answers
        finally:
            await server.stop(0)

    assert asyncio.run(run()) == ["authorization", "authorization,x-prefix-key", "x-prefix-key"]


def test_both_clients_call_over_tls_with_a_token(tmp_path):
    credential_files = CredentialFiles(tmp_path)
    engine = FakeEngine()
    engine.events = FakeSource()

    def talk(address):
        with Client(address, timeout_s=PATIENCE_S, **credential_files.client("boss")) as client:
            return client.prefill([1, 2]).next_token_id, next(client.subscribe()).snapshot.count

    async def run():
        async with serving(engine, **credential_files.tls) as (_, address):
            async with AsyncClient(address, timeout_s=PATIENCE_S, **credential_files.client("boss")) as client:
                awaited = (await client.prefill([1, 2])).next_token_id, (await anext(client.subscribe())).snapshot.count
            return awaited, await asyncio.to_thread(talk, address)

    awaited, blocking = asyncio.run(run())
    assert awaited == blocking == (3, 1)
