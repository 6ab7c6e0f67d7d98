"""Lists what is cached: segments (nodes of the radix trees) on the device, and namespaces in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.api.segments import Segment, SegmentPage, StoredNamespace, StoredPage
from radixkv.cache.segment_index import MAX_SEGMENTS
from radixkv.errors import InvalidRequest
from radixkv.service.server.hottest_segments import HottestSegments
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.opaque_ids import NamespaceIds, PageTokens, SegmentIds
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.messages import require_names
from radixkv.v1 import cache_pb2, hints_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
# Maximum number of engine calls per page. If only few of very many segments or namespaces belong to a tenant, a page
# may have few entries or none, even if more pages follow.
MAX_CALLS = 64


class SegmentLister:
    """Answers `ListSegments`. Each engine call occupies the engine's thread for less than 1 ms.

    Args:
        engine: the engine whose cache is listed.
        mailbox: delivers the engine's results.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._namespace_ids = NamespaceIds()
        self._segment_ids = SegmentIds()
        self._page_tokens = PageTokens(engine.limits.epoch)

    async def list(self, request: cache_pb2.ListSegmentsRequest) -> cache_pb2.ListSegmentsResponse:
        """Validate a request and answer it.

        Raises:
            InvalidRequest: a field is invalid, or cannot be combined with another one.
            Draining, StepHangs: the engine accepts no calls.
        """
        require_names(tenant=request.tenant, store=request.store, session_id=request.session_id)
        tenant = request.tenant if request.HasField("tenant") else None
        page_size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        max_page_size = MAX_SEGMENTS if request.hottest_first else MAX_PAGE_SIZE
        if not 1 <= page_size <= max_page_size:
            raise InvalidRequest(f"page_size: expected 1 to {max_page_size}, got {page_size}")
        if request.session_id:
            return await self._list_session(request, tenant)
        if request.hottest_first:
            if request.store:
                raise InvalidRequest("store: can't be combined with hottest_first")
            if request.page_token:
                raise InvalidRequest("page_token: can't be combined with hottest_first")
            return await self._list_hottest(tenant, page_size)
        position = self._page_tokens.position_of(request.page_token)
        return await self._list_page(request.store, position, tenant, page_size)

    async def _list_page(
        self, store: str, position: int | None, tenant: str | None, page_size: int
    ) -> cache_pb2.ListSegmentsResponse:
        """List segments, or the namespaces in a store if its name is not empty."""
        response = cache_pb2.ListSegmentsResponse()
        source, max_listed = self._engine.segments, page_size
        for _ in range(MAX_CALLS):
            assert position is not None
            page: SegmentPage | StoredPage
            if store:
                page = await result_of(self._engine, self._mailbox, source.stored(store, position, tenant, max_listed))
                response.stored.extend(map(self._stored_message, page.namespaces))
                total = page.num_namespaces
            else:
                page = await result_of(self._engine, self._mailbox, source.page(position, tenant, max_listed))
                response.segments.extend(map(self._segment_message, page.segments))
                total = page.num_segments
            response.compared_segments += page.num_compared
            position = page.next_start
            if tenant is None:
                response.total_segments = total
            max_listed = page_size - len(response.segments) - len(response.stored)
            if position is None or max_listed == 0:
                break
        response.next_page_token = self._page_tokens.token(position)
        return response

    async def _list_session(
        self, request: cache_pb2.ListSegmentsRequest, tenant: str | None
    ) -> cache_pb2.ListSegmentsResponse:
        if tenant is None:
            raise InvalidRequest("session_id: requires a tenant, since each tenant has its own sessions")
        for field in ("store", "page_token", "hottest_first"):
            if getattr(request, field):
                raise InvalidRequest(f"{field}: can't be combined with session_id")
        future = self._engine.segments.of_session(tenant, request.session_id, MAX_PAGE_SIZE)
        page = await result_of(self._engine, self._mailbox, future)
        segments = [self._segment_message(each) for each in page.segments]
        return cache_pb2.ListSegmentsResponse(segments=segments, compared_segments=len(segments))

    async def _list_hottest(self, tenant: str | None, page_size: int) -> cache_pb2.ListSegmentsResponse:
        hottest = HottestSegments(page_size, tenant)
        while (future := hottest.next_call(self._engine.segments)) is not None:
            hottest.add(await result_of(self._engine, self._mailbox, future))
        return cache_pb2.ListSegmentsResponse(
            segments=map(self._segment_message, hottest.result()),
            total_segments=hottest.num_segments if tenant is None else None,
            compared_segments=hottest.num_compared,
        )

    def _segment_message(self, segment: Segment) -> cache_pb2.Segment:
        namespace = segment.namespace
        return cache_pb2.Segment(
            segment_id=self._segment_ids.of(segment.number),
            parent_id=self._segment_ids.of(segment.parent_number),
            tenant=namespace.tenant,
            adapter=namespace.adapter,
            adapter_names=self._engine.adapters.names_of(namespace.adapter),
            namespace_id=self._namespace_ids.of(namespace),
            has_salt=bool(namespace.salt),
            start_token=segment.start_token,
            num_tokens=segment.num_tokens,
            num_blocks=segment.num_blocks,
            num_children=segment.num_children,
            num_uses=segment.num_uses,
            idle_s=segment.idle_s,
            heat=segment.heat,
            num_leases=segment.num_leases,
            priority=segment.priority,
            is_retained=segment.is_retained,
            expires_in_s=segment.expires_in_s,
            session_id=segment.session_id,
            awaits=hints_pb2.Awaits.Name(segment.awaits.value),
        )

    def _stored_message(self, stored: StoredNamespace) -> cache_pb2.StoredNamespace:
        namespace = stored.namespace
        return cache_pb2.StoredNamespace(
            tenant=namespace.tenant,
            adapter=namespace.adapter,
            adapter_names=self._engine.adapters.names_of(namespace.adapter),
            namespace_id=self._namespace_ids.of(namespace),
            has_salt=bool(namespace.salt),
            num_blocks=stored.num_blocks,
            num_tokens=stored.num_blocks * self._engine.limits.block_size,
            num_retained_blocks=stored.num_retained_blocks,
        )
