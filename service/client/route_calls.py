"""The call of a client about the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.service.client.lease_calls import AsyncLeaseCalls, LeaseCalls
from radixkv.service.client.served_tokenizer import AsyncServedTokenizer, ServedTokenizer
from radixkv.service.token_ids import TokenIds, pack_token_ids, write_token_ids
from radixkv.v1.fleet_pb2 import RouteRequest, RouteResponse
from radixkv.v1.fleet_pb2_grpc import FleetServiceStub


class RouteCalls(LeaseCalls):
    """Call of `Client` to a fleet, for callers who talk to its replicas themselves."""

    _fleet: FleetServiceStub
    _served: ServedTokenizer

    def route(
        self,
        prompt: str | TokenIds,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        avoid: Iterable[str] = (),
    ) -> RouteResponse:
        """Ask a fleet which replica gets a prompt. Ask once for each request: the fleet expects it there.

        Args:
            prompt, tenant, adapter, salt: of the request.
            avoid: addresses of replicas that must not get it, such as one that just failed.

        Raises:
            TypeError, ValueError: `prompt` is neither text nor uint32 numbers, or another argument does not fit;
                nothing was sent.
            Unavailable: no replica is left.
            Unimplemented: the service is a single server, not a fleet.
        """
        request = route_request(self._served.token_ids(prompt), tenant, adapter, salt, avoid)
        answer: RouteResponse = self._ask(self._fleet.Route, request)
        return answer


class AsyncRouteCalls(AsyncLeaseCalls):
    """Call of `AsyncClient` to a fleet; see `RouteCalls`."""

    _fleet: FleetServiceStub
    _served: AsyncServedTokenizer

    async def route(
        self,
        prompt: str | TokenIds,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        avoid: Iterable[str] = (),
    ) -> RouteResponse:
        """Ask a fleet which replica gets a prompt; see `RouteCalls.route`."""
        token_ids = await self._served.token_ids(prompt)
        request = route_request(token_ids, tenant, adapter, salt, avoid)
        answer: RouteResponse = await self._ask(self._fleet.Route, request)
        return answer


def route_request(token_ids: TokenIds, tenant: str, adapter: str, salt: str, avoid: Iterable[str]) -> RouteRequest:
    """Make the message of `RouteCalls.route`."""
    request = RouteRequest(tenant=tenant, adapter=adapter, salt=salt, avoid=avoid)
    write_token_ids(request, pack_token_ids(token_ids))
    return request
