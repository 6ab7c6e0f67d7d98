"""Ends streams whose caller may no longer make the call: its credential was removed, has expired or lost a right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from radixkv.errors import RadixKVError

PERIOD_S = 1.0


class Revocation:
    """An asynchronous context in which a call runs as long as its caller is authorized.

    The authorization is checked once per second. When the caller is refused, the await inside the context is cancelled,
    and the context raises the refusal. While gRPC writes a response that was yielded to it, nothing is cancelled,
    because gRPC would then send no status; the refusal is raised after the write. For a call that ends within a second,
    the only cost is a timer.

    Args:
        require_authorized: raises the refusal; None if every caller may make the call at any time.

    Example:
        ```python
        async with Revocation(partial(authorizer.require_still_authorized, authorization, context)) as revocation:
            async for response in responses:
                revocation.begin_write()
                yield response
                revocation.end_write()
        ```
    """

    def __init__(self, require_authorized: Callable[[], None] | None) -> None:
        self._require_authorized = require_authorized
        self._refusal: RadixKVError | None = None
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False

    def begin_write(self) -> None:
        """Record that gRPC now writes a response that is yielded to it."""
        self._is_writing = True

    def end_write(self) -> None:
        """Record that the write has ended. Raises the refusal if the call was refused meanwhile."""
        self._is_writing = False
        if self._refusal is not None:
            raise self._refusal

    async def __aenter__(self) -> Self:
        if self._require_authorized is not None:
            await self._timeout.__aenter__()
            self._schedule_check()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        if error_type is GeneratorExit:  # the call has ended, so nothing would receive the exception
            return
        try:
            await self._timeout.__aexit__(error_type, error, trace)
        except TimeoutError:
            if self._refusal is None:
                raise
        if self._refusal is not None and self._timeout.expired():
            raise self._refusal

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def _check(self) -> None:
        assert self._require_authorized is not None
        try:
            self._require_authorized()
        except RadixKVError as refusal:
            self._refusal = refusal
            if not self._is_writing:
                self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._schedule_check()
