"""The table of gRPC methods that the clients call, with their messages and whether gRPC may retry them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from radixkv.v1 import cache_pb2 as cache
from radixkv.v1 import events_pb2, fleet_pb2, model_pb2
from radixkv.v1 import prefill_pb2 as prefill

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True, eq=False)
class Method(Generic[Request, Response]):
    """One gRPC method.

    Attributes:
        service: full name of the gRPC service.
        name: name of the method.
        request, response: its message classes.
        is_streaming: whether the server responds with a stream of messages.
        is_idempotent: whether two calls have the same effect as one, so that gRPC may retry a call.
        prompt_of: returns the part of a request that has the prompt, from which the prefix key is computed; None if
            calls send no prefix key.
    """

    service: str
    name: str
    request: type[Request]
    response: type[Response]
    is_streaming: bool = False
    is_idempotent: bool = False
    prompt_of: Callable[[Request], Any] | None = None

    def bind(self, channel: grpc.Channel | grpc.aio.Channel) -> Any:
        """Return the callable that makes this call on a channel."""
        bind = channel.unary_stream if self.is_streaming else channel.unary_unary
        return bind(
            f"/{self.service}/{self.name}",
            request_serializer=self.request.SerializeToString,
            response_deserializer=self.response.FromString,
        )


class ServingStatus(enum.Enum):
    """Whether a server accepts requests; the values are those of `grpc.health.v1.HealthCheckResponse`."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def _itself(request: Request) -> Request:
    return request


def _prefill_part(request: prefill.GenerateRequest) -> prefill.PrefillRequest:
    return request.prefill


_PREFILL = "radixkv.v1.PrefillService"
_CACHE = "radixkv.v1.CacheService"
_MODEL = "radixkv.v1.ModelService"
_EVENTS = "radixkv.v1.EventService"
_FLEET = "radixkv.v1.FleetService"
_HEALTH = "grpc.health.v1.Health"

PREFILL = Method(
    _PREFILL, "Prefill", prefill.PrefillRequest, prefill.PrefillResponse, is_idempotent=True, prompt_of=_itself
)
GENERATE = Method(
    _PREFILL,
    "Generate",
    prefill.GenerateRequest,
    prefill.GenerateResponse,
    is_streaming=True,
    is_idempotent=True,
    prompt_of=_prefill_part,
)
PROBE = Method(_PREFILL, "Probe", prefill.ProbeRequest, prefill.ProbeResponse, is_idempotent=True, prompt_of=_itself)
RELEASE = Method(_PREFILL, "Release", prefill.ReleaseRequest, prefill.ReleaseResponse)  # a second call finds no lease
RENEW = Method(_PREFILL, "Renew", prefill.RenewRequest, prefill.RenewResponse, is_idempotent=True)
FETCH_KV = Method(_PREFILL, "FetchKV", prefill.FetchKVRequest, prefill.FetchKVResponse, is_streaming=True)

RETAIN = Method(_CACHE, "Retain", cache.RetainRequest, cache.RetainResponse, is_idempotent=True, prompt_of=_itself)
HINT = Method(_CACHE, "Hint", cache.HintRequest, cache.HintResponse, prompt_of=_itself)
EXPLAIN = Method(_CACHE, "Explain", cache.ExplainRequest, cache.ExplainResponse, is_idempotent=True, prompt_of=_itself)
END_SESSION = Method(_CACHE, "EndSession", cache.EndSessionRequest, cache.EndSessionResponse)
PURGE = Method(_CACHE, "Purge", cache.PurgeRequest, cache.PurgeResponse)  # a second call counts no blocks
STATS = Method(_CACHE, "Stats", cache.StatsRequest, cache.StatsResponse, is_idempotent=True)
STATEMENT = Method(_CACHE, "Statement", cache.StatementRequest, cache.StatementResponse, is_idempotent=True)
DIAGNOSE = Method(_CACHE, "Diagnose", cache.DiagnoseRequest, cache.DiagnoseResponse, is_idempotent=True)
LIST_SEGMENTS = Method(
    _CACHE, "ListSegments", cache.ListSegmentsRequest, cache.ListSegmentsResponse, is_idempotent=True
)
LOAD_ADAPTER = Method(_CACHE, "LoadAdapter", cache.LoadAdapterRequest, cache.LoadAdapterResponse)
UNLOAD_ADAPTER = Method(_CACHE, "UnloadAdapter", cache.UnloadAdapterRequest, cache.UnloadAdapterResponse)
LIST_ADAPTERS = Method(
    _CACHE, "ListAdapters", cache.ListAdaptersRequest, cache.ListAdaptersResponse, is_idempotent=True
)
REGISTER_PUBLIC_PREFIX = Method(
    _CACHE, "RegisterPublicPrefix", cache.RegisterPublicPrefixRequest, cache.RegisterPublicPrefixResponse
)
UNREGISTER_PUBLIC_PREFIX = Method(
    _CACHE, "UnregisterPublicPrefix", cache.UnregisterPublicPrefixRequest, cache.UnregisterPublicPrefixResponse
)
LIST_PUBLIC_PREFIXES = Method(
    _CACHE,
    "ListPublicPrefixes",
    cache.ListPublicPrefixesRequest,
    cache.ListPublicPrefixesResponse,
    is_idempotent=True,
)
DRAIN = Method(_CACHE, "Drain", cache.DrainRequest, cache.DrainResponse)

GET_TOKENIZER = Method(
    _MODEL,
    "GetTokenizer",
    model_pb2.GetTokenizerRequest,
    model_pb2.TokenizerChunk,
    is_streaming=True,
    is_idempotent=True,
)
SUBSCRIBE = Method(_EVENTS, "Subscribe", events_pb2.SubscribeRequest, events_pb2.EventBatch, is_streaming=True)
ROUTE = Method(_FLEET, "Route", fleet_pb2.RouteRequest, fleet_pb2.RouteResponse)

# HealthCheckRequest is one string and HealthCheckResponse one enum, both with field number 1. On the wire they equal
# these wrappers, so clients do not need the package grpcio-health-checking. The number is a `ServingStatus`.
HEALTH_CHECK = Method(_HEALTH, "Check", StringValue, Int32Value)

METHODS: tuple[Method[Any, Any], ...] = tuple(each for each in globals().values() if isinstance(each, Method))
"""All methods above."""
