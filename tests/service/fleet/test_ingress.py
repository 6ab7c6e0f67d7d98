"""The ingress with a fake of Ray's handle."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from radixkv.config import FleetConfig, ServerConfig
from radixkv.errors import NoReplica
from radixkv.service.fleet.fleet_state import FleetState
from radixkv.service.fleet.ingress import Ingress
from radixkv.service.fleet.routing_request import ReplicaListing, RoutingRequest
from tests.patience import PATIENCE_S
from tests.service.fleet.fake_connection import FakeConnection, facts


class Handle:
    """Routes by a fleet's state, as Ray's handle does by the router of a deployment, while `can_choose` is set."""

    def __init__(self) -> None:
        self.state = FleetState(FakeConnection)
        self.can_choose = asyncio.Event()

    @contextlib.asynccontextmanager
    async def choose_replica(self, prompt, *, _reserve):
        assert not _reserve
        await self.can_choose.wait()
        if isinstance(prompt, ReplicaListing):
            prompt.connections = self.state.connections
        else:
            prompt.routed = self.state.route(prompt)
        yield


def test_the_ingress_listens_as_soon_as_a_replica_is_available() -> None:
    async def test() -> None:
        handle = Handle()
        starting = asyncio.create_task(start_ingress(handle))
        await asyncio.sleep(0)
        assert not starting.done()
        handle.state.update([facts("a")])
        handle.can_choose.set()
        ingress = await starting
        await ingress.check_health()
        assert (await ingress.choose(RoutingRequest(b"1234"))).name == "a"
        assert [connection.facts.address for connection in await ingress.connections()] == ["a"]
        with pytest.raises(NoReplica):
            await ingress.choose(RoutingRequest(b"1234", avoid={"a"}))
        handle.can_choose.clear()
        with pytest.raises(NoReplica, match=r"none was available within 0\.05 s"):
            await ingress.choose(RoutingRequest(b"1234"))
        assert await ingress.connections() == []
        await ingress.__del__()
        del Ingress.__del__  # as Ray does, since Python can't await it
        await handle.state.close()

    async def start_ingress(handle) -> Ingress:
        ingress = object.__new__(Ingress)
        await ingress.__init__(ServerConfig(port=0), FleetConfig(start_timeout_s=0.05), handle)
        return ingress

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
