"""Answers `ListSegments`: pages by place, the hottest, or what a store holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.api.segments import Segment
from radixkv.cache.segment_index import MAX_SEGMENTS
from radixkv.errors import InvalidRequest
from radixkv.service.server.calls import answer_of
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.messages import require_names
from radixkv.service.server.segments.hot_walk import HotWalk
from radixkv.service.server.segments.namespace_ids import NamespaceIds
from radixkv.service.server.segments.page_tokens import PageTokens
from radixkv.service.server.segments.segment_ids import SegmentIds
from radixkv.service.server.segments.stored_lister import StoredLister
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
# Calls of the engine for one page: a tenant with little in a large cache gets pages that have few segments, or none.
MAX_CALLS = 64


class SegmentLister:
    """Lists the segments of an engine's cache. Each call holds the engine's thread for less than 1 ms."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._namespace_ids = NamespaceIds()
        self._segment_ids = SegmentIds()
        self._page_tokens = PageTokens(engine.limits.epoch)
        self._stores = StoredLister(engine, mailbox, self._namespace_ids, self._page_tokens)

    async def answer(self, request: cache_pb2.ListSegmentsRequest) -> cache_pb2.ListSegmentsResponse:
        """Read a request and answer it.

        Raises:
            InvalidRequest: a field is out of range.
            Draining, StepHangs: the engine takes no calls.
        """
        require_names(tenant=request.tenant, store=request.store)
        tenant = request.tenant if request.HasField("tenant") else None
        page_size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        most = MAX_SEGMENTS if request.hottest_first else MAX_PAGE_SIZE
        if not 1 <= page_size <= most:
            raise InvalidRequest(f"page_size: expected 1 to {most}, got {page_size}")
        if request.store and request.hottest_first:
            raise InvalidRequest("store: expected none beside hottest_first, got one")
        if not request.hottest_first:
            place = self._page_tokens.place_of(request.page_token)
            if request.store:
                return await self._stores.page(request.store, place, tenant, page_size)
            return await self._page(place, tenant, page_size)
        if request.page_token:
            raise InvalidRequest("page_token: expected none beside hottest_first, got one")
        return await self._hottest(tenant, page_size)

    async def _page(self, place: int | None, tenant: str | None, page_size: int) -> cache_pb2.ListSegmentsResponse:
        answer = cache_pb2.ListSegmentsResponse()
        for _ in range(MAX_CALLS):
            assert place is not None
            future = self._engine.segments.page(place, tenant, page_size - len(answer.segments))
            page = await answer_of(self._engine, self._mailbox, future)
            answer.segments.extend(map(self._message, page.segments))
            answer.compared_segments += page.num_compared
            place = page.next_place
            if tenant is None:
                answer.total_segments = page.num_segments
            if place is None or len(answer.segments) == page_size:
                break
        answer.next_page_token = self._page_tokens.token(place)
        return answer

    async def _hottest(self, tenant: str | None, page_size: int) -> cache_pb2.ListSegmentsResponse:
        walk = HotWalk(page_size, tenant)
        while (future := walk.next_call(self._engine.segments)) is not None:
            walk.take(await answer_of(self._engine, self._mailbox, future))
        return cache_pb2.ListSegmentsResponse(
            segments=map(self._message, walk.hottest()),
            total_segments=walk.num_segments if tenant is None else None,
            compared_segments=walk.num_compared,
        )

    def _message(self, segment: Segment) -> cache_pb2.Segment:
        namespace = segment.namespace
        return cache_pb2.Segment(
            segment_id=self._segment_ids.of(segment.place),
            parent_id=self._segment_ids.of(segment.parent_place),
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
        )
