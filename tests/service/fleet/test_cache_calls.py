"""Purge and Stats of a fleet, over real connections to servers of fake engines."""

from __future__ import annotations

import hashlib

import grpc
import grpc.aio
import pytest

from radixkv.errors import Draining
from radixkv.service.client import AsyncClient
from radixkv.v1 import cache_pb2, cache_pb2_grpc
from tests.service.fleet.test_ingress_server import fleet, run


def test_a_purge_reaches_all_replicas() -> None:
    async def test() -> None:
        async with fleet(3) as served, AsyncClient(served.address) as client:
            told = await client.purge(tenant="acme")
            assert (told.freed_blocks, told.pinned_blocks) == (3 * 7, 3 * 2)
            purges = [engine.purges for engine in served.engines.values()]
            assert purges == [purges[0]] * 3
            assert purges[0] == [("acme", None, None)]
            await client.purge(everything=True)
            assert [len(engine.purges) for engine in served.engines.values()] == [2, 2, 2]

    run(test)


def test_a_purge_that_misses_a_replica_says_which() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            failing = list(served.engines)[1]
            served.engines[failing].purge = refuse
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.purge(everything=True)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"expected an answer of all 2, got none of {failing}" in refused.value.details()
            first = next(iter(served.engines))
            assert len(served.engines[first].purges) == 1

    run(test)


def refuse(**_) -> None:
    raise Draining("service: expected to be serving, got draining")


def test_statistics_are_sums_and_those_of_each_replica() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            told = await client.stats()
            assert [each.address for each in told.replicas] == list(served.engines)
            parts = [each.stats for each in told.replicas]
            assert told.blocks.total == sum(each.blocks.total for each in parts) > 0
            assert (told.model, told.epoch) == (parts[0].model, 0)
            mine = await client.stats(tenant="a")
            assert {each.tenant for each in mine.tenants} <= {"a"}

    run(test)


def test_a_replica_that_can_not_be_asked_is_named_and_not_counted() -> None:
    async def test() -> None:
        async with fleet(2, answer_s=0.2) as served, AsyncClient(served.address) as client:
            connection = served.state.connections[1]
            connection.cache = cache_pb2_grpc.CacheServiceStub(grpc.aio.insecure_channel("127.0.0.1:1"))
            told = await client.stats()
            first, second = told.replicas
            assert (first.error, second.HasField("stats")) == ("", False)
            assert second.error.startswith("UNAVAILABLE: ")
            assert told.blocks == first.stats.blocks
            served.state.connections[0].cache = connection.cache
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stats()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            served.state.update(())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stats()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_callers_may_what_they_may_on_a_server(tmp_path) -> None:
    roles = {"own": 'role = "tenant"\ntenant = "acme"', "all": 'role = "admin"', "seen": 'role = "reader"'}
    credentials = [
        f'[[credentials]]\nname = "{name}"\n{role}\ntoken_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name, role in roles.items()
    ]
    (tmp_path / "tokens").write_text("".join(credentials), "utf-8")

    async def test() -> None:
        async with fleet(1, tokens_file=str(tmp_path / "tokens"), insecure=True) as served:
            (engine,) = served.engines.values()
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub = cache_pb2_grpc.CacheServiceStub(channel)
                everything, other = cache_pb2.PurgeRequest(), cache_pb2.PurgeRequest(tenant="b")
                for name, request, code in (
                    (None, everything, grpc.StatusCode.UNAUTHENTICATED),
                    ("seen", everything, grpc.StatusCode.PERMISSION_DENIED),
                    ("own", other, grpc.StatusCode.PERMISSION_DENIED),
                ):
                    metadata = (("authorization", f"Bearer {name}"),) if name else ()
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.Purge(request, metadata=metadata)
                    assert refused.value.code() is code
                assert engine.purges == []
                await stub.Purge(everything, metadata=(("authorization", "Bearer own"),))
                await stub.Purge(everything, metadata=(("authorization", "Bearer all"),))
                assert [tenant for tenant, _, _ in engine.purges] == ["acme", None]
                await stub.Stats(cache_pb2.StatsRequest(), metadata=(("authorization", "Bearer seen"),))

    run(test)
