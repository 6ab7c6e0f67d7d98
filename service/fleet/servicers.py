"""The gRPC services of a fleet's ingress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from radixkv.errors import InvalidRequest, SwitchedOff
from radixkv.service.fleet.disaggregated_prefill import DisaggregatedPrefill, SourceLost
from radixkv.service.fleet.forwarder import Forwarder, ReplicaRefusal
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.service.fleet.routing_request import ANY_PROMPT, RoutedRequest, RoutingRequest
from radixkv.service.server.calls import Context
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.servicers.engine_calls import traceparent_of
from radixkv.service.server.servicers.messages import read_num_completions, read_sampling, require_names
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, fleet_pb2, fleet_pb2_grpc, model_pb2, model_pb2_grpc, prefill_pb2, prefill_pb2_grpc

REPLICA = "radixkv-replica"
"""Name of the trailing metadata with the address of the replica that responded."""

_Prompt = TypeVar(
    "_Prompt",
    prefill_pb2.PrefillRequest,
    prefill_pb2.ProbeRequest,
    cache_pb2.ExplainRequest,
    fleet_pb2.RouteRequest,
    cache_pb2.HintRequest,
)


class FleetPrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Forwards each prompt to the replica that the router chooses.

    Args:
        forwarder: forwards calls; if replicas have roles, to prefill replicas.
        disaggregated: handles `Generate` if replicas have roles (prefill or decode); None if they have none.
    """

    def __init__(self, forwarder: Forwarder, disaggregated: DisaggregatedPrefill | None = None) -> None:
        self._forwarder = forwarder
        self._disaggregated = disaggregated
        self._decode_forwarder = forwarder if disaggregated is None else disaggregated.decode_forwarder

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:  # noqa: N802
        """Prefill a prompt on a replica."""
        if request.hold_lease:
            raise _only_on_replicas("hold_lease")
        prompt = routing_request(request)
        async with replica_errors_as_status(context):
            response: prefill_pb2.PrefillResponse
            routed, response = await self._forwarder.call(
                prompt, lambda connection: connection.prefill.Prefill(request, **call_options(connection, context))
            )
        routed.finish(response.usage.computed_tokens)
        name_replica(routed, context)
        return response

    async def Generate(  # noqa: N802
        self, request: prefill_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.GenerateResponse]:
        """Generate on a replica; with a `kv_source`, on another replica than the source, unless there is no other."""
        async with (
            replica_errors_as_status(context),
            contextlib.aclosing(await self._responses(request, context)) as responses,
        ):
            async for routed, response in responses:
                if response.HasField("usage"):
                    if self._disaggregated is None:  # otherwise the request counts as load until its end
                        routed.finish(response.usage.computed_tokens)
                    name_replica(routed, context)
                yield response

    async def _responses(
        self, request: prefill_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[tuple[RoutedRequest, prefill_pb2.GenerateResponse], None]:
        """Return a stream of responses, each with the replica that generates."""
        prompt = routing_request(request.prefill, "prefill.token_ids")
        if self._disaggregated is not None:
            if not request.HasField("kv_source"):
                read_sampling(request)
                read_num_completions(request)  # validate before anything is computed
                return self._disaggregated.stream(
                    request,
                    lambda: routing_request(request.prefill),
                    lambda connection: call_options(connection, context),
                )
            source_prompt = routing_request(request.prefill)
            source_prompt.source = _source_address(request)
            (await self._forwarder.choose(source_prompt)).finish(0)  # refuses addresses that are not replicas
        elif request.HasField("kv_source"):
            prompt.source = _source_address(request)
        return self._decode_forwarder.stream(
            prompt,
            lambda connection: connection.prefill.Generate(
                _without_own_source(connection, request), **call_options(connection, context)
            ),
        )

    async def Probe(self, request: prefill_pb2.ProbeRequest, context: Context) -> prefill_pb2.ProbeResponse:  # noqa: N802
        """Probe the replica that would get the prompt."""
        response: prefill_pb2.ProbeResponse = await call_without_load(
            self._forwarder,
            routing_request(request),
            lambda connection: connection.prefill.Probe(request, **call_options(connection, context)),
            context,
        )
        return response

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:  # noqa: N802
        """Refuse the call, because only the replica that holds a lease can answer it."""
        raise _only_on_replicas("Release")

    async def Renew(self, request: prefill_pb2.RenewRequest, context: Context) -> prefill_pb2.RenewResponse:  # noqa: N802
        """Refuse the call, because only the replica that holds a lease can answer it."""
        raise _only_on_replicas("Renew")

    async def FetchKV(  # noqa: N802
        self, request: prefill_pb2.FetchKVRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.FetchKVResponse]:
        """Refuse the call, because only the replica that holds a lease can answer it."""
        raise _only_on_replicas("FetchKV")
        yield  # makes this method a stream


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Returns the replica that a client should call for a prompt.

    Args:
        forwarder: chooses the replica.
    """

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def Route(self, request: fleet_pb2.RouteRequest, context: Context) -> fleet_pb2.RouteResponse:  # noqa: N802
        """Choose a replica. The prompt counts as load of this replica until it is expected to be computed."""
        prompt = routing_request(request)
        prompt.avoid.update(request.avoid)
        async with replica_errors_as_status(context):
            routed = await self._forwarder.choose(prompt)
        asyncio.get_running_loop().call_later(routed.expected_s, routed.finish, None)
        return fleet_pb2.RouteResponse(
            address=routed.name,
            reason=routed.reason.value,
            cached_tokens=routed.route.hits.total,
            most_cached_tokens=routed.route.max_hit_tokens,
            queue_tokens=routed.route.queue_tokens,
            num_replicas=routed.num_replicas,
        )


class FleetModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Forwards calls for the tokenizer to any replica, since all serve the same model.

    Args:
        forwarder: forwards calls.
    """

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[model_pb2.TokenizerChunk]:
        """Send the files of the tokenizer."""
        chunks = self._forwarder.stream(
            RoutingRequest(ANY_PROMPT),
            lambda connection: connection.model.GetTokenizer(request, **call_options(connection, context)),
        )
        async with replica_errors_as_status(context), contextlib.aclosing(chunks):
            async for routed, chunk in chunks:
                routed.finish(0)
                yield chunk


def add_partial_service(
    server: GuardedServer,
    service: ServiceDescriptor,
    methods: Mapping[str, Callable[[Any, Context], Awaitable[Any]]] = MappingProxyType({}),
) -> None:
    """Add a service of which a fleet implements only `methods`. Calls of other methods are refused."""

    def refusal(name: str) -> Any:
        async def refuse(request: object, context: Context) -> None:
            raise _only_on_replicas(name)

        return refuse

    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            methods.get(method.name) or refusal(method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for method in service.methods
    }
    server.add_service(service.full_name, handlers)


def _only_on_replicas(subject: str) -> SwitchedOff:
    return SwitchedOff(f"{subject}: a fleet does not offer it; call a replica, whose address `Route` returns")


def routing_request(request: _Prompt, field: str = "token_ids") -> RoutingRequest:
    """Return the prompt of a request as the router sees it; `field` is its name in errors.

    Raises:
        InvalidRequest: the prompt is empty, or a name is too long.
    """
    require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
    tokens = read_token_ids(request)
    if not tokens:
        raise InvalidRequest(f"{field}: expected at least 1 token, got 0")
    return RoutingRequest(tokens, request.tenant, request.adapter, request.salt)


def _source_address(request: prefill_pb2.GenerateRequest) -> str:
    """Return the address in the `kv_source` of a request."""
    address: str = request.kv_source.address
    if not address:
        raise InvalidRequest("kv_source.address: it is empty; it must be the address of a replica")
    return address


def _without_own_source(
    connection: ReplicaConnection, request: prefill_pb2.GenerateRequest
) -> prefill_pb2.GenerateRequest:
    """Remove the `kv_source` from a request if the source is the replica that gets the request."""
    if request.kv_source.address == connection.facts.address:
        request.ClearField("kv_source")
    return request


def call_options(connection: ReplicaConnection, context: Context) -> dict[str, Any]:
    """Return the deadline and the metadata of a call to a replica on behalf of another call.

    Each call has a deadline, so that a slow reader does not occupy the replica forever.
    """
    remaining_s = context.time_remaining()
    max_s = connection.facts.max_deadline_s
    traceparent = traceparent_of(context)
    metadata = (*connection.metadata, ("traceparent", traceparent)) if traceparent else connection.metadata
    return {"timeout": max_s if remaining_s is None else min(remaining_s, max_s), "metadata": metadata}


async def call_without_load(
    forwarder: Forwarder,
    prompt: RoutingRequest,
    make_call: Callable[[ReplicaConnection], Awaitable[Any]],
    context: Context,
) -> Any:
    """Call the replica that would get a prompt with a method that computes nothing. Returns its response.

    Args:
        forwarder: chooses the replica.
        prompt: the prompt.
        make_call: calls a replica.
        context: the call that is forwarded. Its client gets the errors, and the address of the replica.
    """
    async with replica_errors_as_status(context):
        routed, response = await forwarder.call(prompt, make_call)
    routed.finish(0)
    name_replica(routed, context)
    return response


def name_replica(routed: RoutedRequest, context: Context) -> None:
    """Send the address of the replica that responded in the trailing metadata."""
    context.set_trailing_metadata(((REPLICA, routed.name),))


@contextlib.asynccontextmanager
async def replica_errors_as_status(context: Context) -> AsyncIterator[None]:
    """Forward errors of replicas to the client, with their status."""
    try:
        yield
    except ReplicaRefusal as refusal:
        await context.abort(refusal.code, refusal.details, refusal.trailing)
    except SourceLost as lost:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(lost))
