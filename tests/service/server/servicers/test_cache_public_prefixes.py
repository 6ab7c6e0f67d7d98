"""RegisterPublicPrefix, UnregisterPublicPrefix and ListPublicPrefixes over a real connection, by both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from radixkv.service.client import AsyncClient, Client
from radixkv.v1.cache_pb2 import PublicPrefix
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call, serving


def refusal_of(call: Callable[[], object]) -> Any:
    """Make a call that must be refused, and return the refusal."""
    with pytest.raises(grpc.RpcError) as refusal:
        call()
    return refusal.value


def test_both_clients_register_list_and_unregister() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            await client.load_adapter("law", "one")
            plain = await client.public.register("system", range(10))
            assert plain == PublicPrefix(name="system", tokens=10, blocks=3, is_computed=True)  # 4 tokens per block
            with Client(address) as blocking:
                legal = await asyncio.to_thread(blocking.public.register, "legal", range(8), adapter="law")
                assert (legal.adapter_digest, legal.adapter_names) == ("one", ["law"])
                listed = await asyncio.to_thread(blocking.public.list)
                assert listed == await client.public.list()
                assert list(listed.public_prefixes) == [plain, legal]
                assert (await asyncio.to_thread(blocking.public.unregister, "legal")).name == "legal"
            assert await client.public.unregister("system") == PublicPrefix(name="system", tokens=10, blocks=3)
            assert not (await client.public.list()).public_prefixes

    asyncio.run(run())
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (
            lambda client: client.public.register("", range(8)),
            "INVALID_ARGUMENT",
            "name: expected at least 1",
        ),
        (lambda client: client.public.register("n" * 257, range(8)), "INVALID_ARGUMENT", "name: expected at most 256"),
        (lambda client: client.public.register("p", range(3)), "INVALID_ARGUMENT", "token_ids: expected at least 4"),
        (lambda client: client.public.register("p", [256] * 8), "INVALID_ARGUMENT", "token_ids[0]: expected an id"),
        (lambda client: client.public.register("p", range(8), adapter="x"), "NOT_FOUND", "adapter: expected"),
        (lambda client: client.public.register("p", range(68)), "RESOURCE_EXHAUSTED", "public prefixes: expected at"),
        (lambda client: client.public.unregister("p"), "NOT_FOUND", "name: expected the name of a public prefix"),
    ],
)
def test_invalid_requests_are_refused_by_name(call: Callable[[Client], object], status: str, message: str) -> None:
    def ask(address: str) -> Any:
        with Client(address) as client:
            return refusal_of(lambda: call(client))

    error = serve_and_call(FakeEngine(), ask)
    assert error.code().name == status
    assert error.details().startswith(message)
