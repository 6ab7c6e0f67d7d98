"""Answers `RegisterPublicPrefix`, `UnregisterPublicPrefix` and `ListPublicPrefixes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.api.public_prefixes import PublicPrefixStatus
from radixkv.service.server.calls import answer_of
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.messages import require_names
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine


class PublicCalls:
    """Registers, unregisters and lists the public prefixes of an engine. A registration goes on if its caller goes."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox

    async def register(self, request: cache_pb2.RegisterPublicPrefixRequest) -> cache_pb2.RegisterPublicPrefixResponse:
        """Make a prefix public, once it is computed.

        Raises:
            InvalidRequest, PromptTooLong: the name is taken, or the tokens are no prefix.
            UnknownAdapter: no adapter has this name.
            OutOfBlocks: public prefixes take as many blocks as they may.
        """
        require_names(name=request.name, adapter=request.adapter)
        future = self._engine.public.register(request.name, read_token_ids(request), request.adapter)
        status = await answer_of(self._engine, self._mailbox, future)
        return cache_pb2.RegisterPublicPrefixResponse(public_prefix=self._message(status))

    async def unregister(
        self, request: cache_pb2.UnregisterPublicPrefixRequest
    ) -> cache_pb2.UnregisterPublicPrefixResponse:
        """Let no more prompts use a prefix. Raises UnknownPublicPrefix if there is none of this name."""
        require_names(name=request.name)
        status = await answer_of(self._engine, self._mailbox, self._engine.public.unregister(request.name))
        return cache_pb2.UnregisterPublicPrefixResponse(public_prefix=self._message(status))

    async def list(self) -> cache_pb2.ListPublicPrefixesResponse:
        """List those that are registered."""
        statuses = await answer_of(self._engine, self._mailbox, self._engine.public.listing())
        return cache_pb2.ListPublicPrefixesResponse(public_prefixes=map(self._message, statuses))

    def _message(self, status: PublicPrefixStatus) -> cache_pb2.PublicPrefix:
        return cache_pb2.PublicPrefix(
            name=status.name,
            tokens=status.num_tokens,
            blocks=status.num_blocks,
            is_computed=status.is_computed,
            users=status.num_users,
            uses=status.num_uses,
            adapter_digest=status.adapter,
            adapter_names=self._engine.adapters.names_of(status.adapter),
        )
