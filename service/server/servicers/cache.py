"""The gRPC service that inspects and administers the cache, adapters and public prefixes, and drains the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.api.caller import Caller
from radixkv.api.stats import DEFAULT_MAX_TENANTS
from radixkv.errors import InvalidRequest, SwitchedOff
from radixkv.service.server.calls import Context
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.servicers.diagnoses import DEFAULT_MAX_CAUSES, MAX_CAUSES, diagnosis_message
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.explanations import Explainer
from radixkv.service.server.servicers.messages import (
    adapter_message,
    grant_message,
    hint_message,
    public_prefix_message,
    purge_message,
    read_caller,
    read_hints,
    read_retention,
    require_names,
    session_message,
    stats_response,
    tenant_stats_response,
)
from radixkv.service.server.servicers.segments import SegmentLister
from radixkv.service.server.servicers.statements import StatementMaker
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, cache_pb2_grpc, explain_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

MAX_SESSIONS = 100


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Serves operators, and tenants for their own data.

    Args:
        engine: the engine that is administered.
        start_drain: makes the service drain soon, as SIGTERM does.
        tokenizer: the model's tokenizer.
        explainer: explains prompts.
    """

    def __init__(
        self, engine: Engine, start_drain: Callable[[], None], tokenizer: ModelTokenizer, explainer: Explainer
    ) -> None:
        self._engine = engine
        self._start_drain = start_drain
        self._mailbox = Mailbox()
        self._segments = SegmentLister(engine, self._mailbox)
        self._explainer = explainer
        self._statements = StatementMaker(engine, self._mailbox)
        if engine.misses is not None:
            # Samples of misses are decoded with the tokenizer, which is loaded when the first one is decoded.
            engine.misses.load_decode = lambda: tokenizer.load().decode

    async def Retain(self, request: cache_pb2.RetainRequest, context: Context) -> cache_pb2.RetainResponse:  # noqa: N802
        """Set the retention priority of a cached range."""
        caller, retention = read_caller(request), read_retention(request)
        if retention is None:
            raise InvalidRequest("retention: it is required")
        future = self._engine.retain(read_token_ids(request), retention, caller)
        retained = await result_of(self._engine, self._mailbox, future)
        return cache_pb2.RetainResponse(retained=grant_message(retained))

    async def Hint(self, request: cache_pb2.HintRequest, context: Context) -> cache_pb2.HintResponse:  # noqa: N802
        """Apply hints about the future use of cached tokens."""
        caller, actions = read_caller(request), read_hints(request.kv_hints)
        tokens = read_token_ids(request) if request.token_ids else b""
        outcomes = await result_of(self._engine, self._mailbox, self._engine.hint(actions, caller, tokens))
        return cache_pb2.HintResponse(hints=map(hint_message, outcomes))

    async def Explain(  # noqa: N802
        self, request: cache_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """Say where a prompt diverges from what is cached in its namespace, and why."""
        return await self._explainer.explain(request)

    async def EndSession(  # noqa: N802
        self, request: cache_pb2.EndSessionRequest, context: Context
    ) -> cache_pb2.EndSessionResponse:
        """End a session of the caller's tenant."""
        require_names(tenant=request.tenant, session_id=request.session_id)
        if not request.session_id:
            raise InvalidRequest("session_id: it is required")
        future = self._engine.end_session(request.session_id, Caller(request.tenant))
        num_blocks = await result_of(self._engine, self._mailbox, future)
        return cache_pb2.EndSessionResponse(was_known=num_blocks is not None, blocks=num_blocks or 0)

    async def Purge(self, request: cache_pb2.PurgeRequest, context: Context) -> cache_pb2.PurgeResponse:  # noqa: N802
        """Delete what is cached in the namespaces that match."""
        require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        future = self._engine.purge(
            tenant=request.tenant if request.HasField("tenant") else None,
            adapter=request.adapter if request.HasField("adapter") else None,
            salt=request.salt if request.HasField("salt") else None,
        )
        return purge_message(await result_of(self._engine, self._mailbox, future))

    async def ListSegments(  # noqa: N802
        self, request: cache_pb2.ListSegmentsRequest, context: Context
    ) -> cache_pb2.ListSegmentsResponse:
        """List what is cached."""
        return await self._segments.list(request)

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:  # noqa: N802
        """Return statistics of the engine, or of one tenant only."""
        require_names(tenant=request.tenant)
        if request.max_sessions > MAX_SESSIONS:
            raise InvalidRequest(f"max_sessions: expected at most {MAX_SESSIONS}, got {request.max_sessions}")
        response = await self._stats(request)
        if request.max_sessions:
            tenant = request.tenant if request.HasField("tenant") else None
            sessions = await result_of(self._engine, self._mailbox, self._engine.sessions(request.max_sessions, tenant))
            response.sessions.extend(map(session_message, sessions))
        return response

    async def Statement(  # noqa: N802
        self, request: cache_pb2.StatementRequest, context: Context
    ) -> cache_pb2.StatementResponse:
        """Return what tenants used in a range of days."""
        return await self._statements.statement(request)

    async def Diagnose(  # noqa: N802
        self, request: cache_pb2.DiagnoseRequest, context: Context
    ) -> cache_pb2.DiagnoseResponse:
        """Return why recent prompts were not reused."""
        require_names(tenant=request.tenant)
        profiler = self._engine.misses
        if profiler is None:
            raise SwitchedOff("Diagnose: switched off, since server.diagnosed_share is 0 or transfer.role is decode")
        max_causes = request.max_causes if request.HasField("max_causes") else DEFAULT_MAX_CAUSES
        if max_causes > MAX_CAUSES:
            raise InvalidRequest(f"max_causes: expected at most {MAX_CAUSES}, got {max_causes}")
        tenant = request.tenant if request.HasField("tenant") else None
        report = await asyncio.to_thread(profiler.report, tenant, max_causes)
        return diagnosis_message(report, has_samples=not request.omit_cached_text)

    async def _stats(self, request: cache_pb2.StatsRequest) -> cache_pb2.StatsResponse:
        max_tenants = request.max_tenants if request.HasField("max_tenants") else DEFAULT_MAX_TENANTS
        if request.HasField("tenant"):
            stats = await result_of(self._engine, self._mailbox, self._engine.stats(tenant=request.tenant))
            return tenant_stats_response(self._engine.limits, stats, request.tenant)
        stats = await result_of(self._engine, self._mailbox, self._engine.stats(max_tenants))
        tiers = () if self._engine.offload is None else self._engine.offload.stats()
        return stats_response(self._engine.limits, stats, tiers)

    async def LoadAdapter(  # noqa: N802
        self, request: cache_pb2.LoadAdapterRequest, context: Context
    ) -> cache_pb2.LoadAdapterResponse:
        """Check the files of an adapter and load it under a name. Cancelling the call does not stop the load."""
        _require_adapter_name(request.name)
        future = self._engine.adapters.load(request.name, request.path)
        loaded = await result_of(self._engine, self._mailbox, future)
        return cache_pb2.LoadAdapterResponse(
            adapter=adapter_message(loaded.adapter), replaced_digest=loaded.replaced_digest
        )

    async def UnloadAdapter(  # noqa: N802
        self, request: cache_pb2.UnloadAdapterRequest, context: Context
    ) -> cache_pb2.UnloadAdapterResponse:
        """Unload the adapter of a name."""
        _require_adapter_name(request.name)
        await result_of(self._engine, self._mailbox, self._engine.adapters.unload(request.name))
        return cache_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: cache_pb2.ListAdaptersRequest, context: Context
    ) -> cache_pb2.ListAdaptersResponse:
        """List the adapters, including those that are draining."""
        adapters = await result_of(self._engine, self._mailbox, self._engine.adapters.listing())
        return cache_pb2.ListAdaptersResponse(
            adapters=map(adapter_message, adapters), max_adapters=self._engine.adapters.max_adapters
        )

    async def RegisterPublicPrefix(  # noqa: N802
        self, request: cache_pb2.RegisterPublicPrefixRequest, context: Context
    ) -> cache_pb2.RegisterPublicPrefixResponse:
        """Compute a prefix and make it public. Cancelling the call does not stop the registration."""
        require_names(name=request.name, adapter=request.adapter)
        future = self._engine.public.register(request.name, read_token_ids(request), request.adapter)
        status = await result_of(self._engine, self._mailbox, future)
        return cache_pb2.RegisterPublicPrefixResponse(
            public_prefix=public_prefix_message(status, self._engine.adapters)
        )

    async def UnregisterPublicPrefix(  # noqa: N802
        self, request: cache_pb2.UnregisterPublicPrefixRequest, context: Context
    ) -> cache_pb2.UnregisterPublicPrefixResponse:
        """Unregister a public prefix: later prompts no longer use it."""
        require_names(name=request.name)
        status = await result_of(self._engine, self._mailbox, self._engine.public.unregister(request.name))
        return cache_pb2.UnregisterPublicPrefixResponse(
            public_prefix=public_prefix_message(status, self._engine.adapters)
        )

    async def ListPublicPrefixes(  # noqa: N802
        self, request: cache_pb2.ListPublicPrefixesRequest, context: Context
    ) -> cache_pb2.ListPublicPrefixesResponse:
        """List the public prefixes."""
        statuses = await result_of(self._engine, self._mailbox, self._engine.public.listing())
        return cache_pb2.ListPublicPrefixesResponse(
            public_prefixes=[public_prefix_message(status, self._engine.adapters) for status in statuses]
        )

    async def Drain(self, request: cache_pb2.DrainRequest, context: Context) -> cache_pb2.DrainResponse:  # noqa: N802
        """Drain and stop the service, as SIGTERM does."""
        self._start_drain()
        return cache_pb2.DrainResponse()


def _require_adapter_name(name: str) -> None:
    require_names(name=name)
    if not name:
        raise InvalidRequest("name: it is empty, and the empty name means the base model")
