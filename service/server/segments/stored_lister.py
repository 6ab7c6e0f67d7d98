"""Answers `ListSegments` for a store: pages of the namespaces of which it holds blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.api.segments import StoredNamespace
from radixkv.service.server.calls import answer_of
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.segments.namespace_ids import NamespaceIds
from radixkv.service.server.segments.page_tokens import PageTokens
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

# Calls of the engine for one page: a tenant with few of very many namespaces gets pages that have few of them, or none.
MAX_CALLS = 64


class StoredLister:
    """Lists what stores below the device hold. Each call holds the engine's thread for less than 1 ms.

    Args:
        engine: whose stores.
        mailbox: brings its answers.
        namespace_ids: numbers of namespaces, the same as those of segments.
        page_tokens: makes the tokens of pages.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox, namespace_ids: NamespaceIds, page_tokens: PageTokens) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._namespace_ids = namespace_ids
        self._page_tokens = page_tokens

    async def page(self, store: str, place: int, tenant: str | None, page_size: int) -> cache_pb2.ListSegmentsResponse:
        """Make a page.

        Raises:
            InvalidRequest: there is no such store.
            Draining, StepHangs: the engine takes no calls.
        """
        answer = cache_pb2.ListSegmentsResponse()
        next_place: int | None = place
        for _ in range(MAX_CALLS):
            assert next_place is not None
            future = self._engine.segments.stored(store, next_place, tenant, page_size - len(answer.stored))
            page = await answer_of(self._engine, self._mailbox, future)
            answer.stored.extend(map(self._message, page.namespaces))
            answer.compared_segments += page.num_compared
            next_place = page.next_place
            if tenant is None:
                answer.total_segments = page.num_namespaces
            if next_place is None or len(answer.stored) == page_size:
                break
        answer.next_page_token = self._page_tokens.token(next_place)
        return answer

    def _message(self, stored: StoredNamespace) -> cache_pb2.StoredNamespace:
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
