from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages that Ray loads
    pytest.importorskip("ray.serve.request_router", reason="the extra ray is not installed")

from radixkv.errors import NoReplica
from radixkv.service.fleet.prefix_router import PrefixRouter
from radixkv.service.fleet.routing_request import RoutingRequest
from tests.service.fleet.fake_connection import facts


def test_a_routing_request_gets_its_result_and_other_calls_may_use_any_replica() -> None:
    async def test() -> None:
        router = object.__new__(PrefixRouter)
        router.initialize_state(routing="prefix", least_match_tokens=8, health_timeout_s=1.0, tls_ca=None, tls_name="")
        router._fleet_state.update([facts("127.0.0.1:1"), facts("127.0.0.1:2")])
        router._by_address = {name: f"replica at {name}" for name in router._fleet_state.addresses}
        prompt = RoutingRequest(bytes(400))
        chosen = await router.choose_replicas(["any"], SimpleNamespace(args=[prompt]))
        assert chosen == [[f"replica at {prompt.routed.name}"]]
        for other in (None, SimpleNamespace(args=[]), SimpleNamespace(args=["something"])):
            assert await router.choose_replicas(["any"], other) == [["any"]]
        prompt.avoid.update(router._fleet_state.addresses)
        with pytest.raises(NoReplica):
            await router.choose_replicas(["any"], SimpleNamespace(args=[prompt]))
        await router._fleet_state.close()

    asyncio.run(test())
