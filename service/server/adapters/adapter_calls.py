"""Answers `LoadAdapter`, `UnloadAdapter` and `ListAdapters`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.api.adapters import Adapter
from radixkv.errors import InvalidRequest
from radixkv.service.server.calls import answer_of
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.messages import require_names
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine


class AdapterCalls:
    """Loads, unloads and lists the adapters of an engine. A load goes on if its caller goes away."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox

    async def load(self, request: cache_pb2.LoadAdapterRequest) -> cache_pb2.LoadAdapterResponse:
        """Let a name stand for an adapter, once its files are read and checked.

        Raises:
            InvalidRequest, InvalidAdapter: the name, the path or a file is wrong.
            SwitchedOff: the service has no adapters, or loads none by calls.
            TooManyAdapters: as many are loaded as may be.
        """
        name = _name(request.name)
        loaded = await answer_of(self._engine, self._mailbox, self._engine.adapters.load(name, request.path))
        return cache_pb2.LoadAdapterResponse(adapter=_message(loaded.adapter), replaced_digest=loaded.replaced_digest)

    async def unload(self, request: cache_pb2.UnloadAdapterRequest) -> cache_pb2.UnloadAdapterResponse:
        """Let a name stand for nothing. Raises UnknownAdapter if it does not stand for an adapter."""
        name = _name(request.name)
        await answer_of(self._engine, self._mailbox, self._engine.adapters.unload(name))
        return cache_pb2.UnloadAdapterResponse()

    async def list(self) -> cache_pb2.ListAdaptersResponse:
        """List all names and what drains."""
        adapters = await answer_of(self._engine, self._mailbox, self._engine.adapters.listing())
        return cache_pb2.ListAdaptersResponse(
            adapters=map(_message, adapters), max_adapters=self._engine.adapters.max_adapters
        )


def _name(name: str) -> str:
    require_names(name=name)
    if not name:
        raise InvalidRequest("name: expected the name of an adapter, got an empty one, which is the model itself")
    return name


def _message(adapter: Adapter) -> cache_pb2.Adapter:
    return cache_pb2.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_on_device=adapter.is_on_device,
        is_draining=adapter.is_draining,
        unfinished_requests=adapter.num_unfinished,
        cached_tokens=adapter.cached_tokens,
    )
