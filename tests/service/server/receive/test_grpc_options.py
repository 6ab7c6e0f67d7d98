import asyncio
import dataclasses

import pytest

from radixkv.config import ServerConfig
from radixkv.service.client import AsyncClient
from radixkv.service.server.receive.grpc_options import grpc_options, max_message_bytes
from tests.service.fake_engine import LIMITS, FakeEngine
from tests.service.serving import serving

SHORT_LIMITS = dataclasses.replace(LIMITS, max_prompt_tokens=1000)


def test_the_largest_message_follows_the_longest_prompt():
    # A token that is not packed takes 5 bytes; all other fields, at most 512 KiB.
    assert max_message_bytes(ServerConfig(), SHORT_LIMITS) == 1000 * 5 + 2**19


def test_a_size_in_the_configuration_is_used():
    assert max_message_bytes(ServerConfig(max_message_bytes=2048), SHORT_LIMITS) == 2048


def test_the_largest_message_is_at_most_as_large_as_grpc_allows():
    limits = dataclasses.replace(LIMITS, max_prompt_tokens=2**31)
    assert max_message_bytes(ServerConfig(), limits) == 2**31 - 1


def test_every_bound_is_passed_to_grpc():
    config = ServerConfig(max_connections=7, max_connection_calls=8, connection_idle_s=1.5, max_calls=9)
    options = dict(grpc_options(config, SHORT_LIMITS))
    assert options["grpc.max_allowed_incoming_connections"] == 7
    assert options["grpc.max_concurrent_streams"] == 8
    assert options["grpc.max_connection_idle_ms"] == 1500
    assert options["grpc.server.max_pending_requests"] == 9


@pytest.mark.parametrize("max_calls", [2**29, 2**30, 2**31 - 1])
def test_a_server_accepts_every_number_of_calls_that_the_configuration_accepts(max_calls):
    async def run():
        async with serving(FakeEngine(), max_calls=max_calls) as (_, address), AsyncClient(address) as client:
            return (await client.prefill([1, 2])).next_token_id

    assert asyncio.run(run()) == 3
