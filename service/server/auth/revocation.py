"""Ends streams whose caller may no longer make the call: its credential was removed, has expired or lost a right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from radixkv.errors import RadixKVError

PERIOD_S = 1.0


class Revocation:
    """An asynchronous context in which a call runs as long as its caller is authorized.

    The call is checked once per second. When it is refused, whatever it waits for is cancelled, and the context raises
    the refusal. A call that is over within a second costs nothing but a timer.

    Args:
        require_authorized: raises the refusal; None if every caller may make the call at any time.

    Example:
        ```python
        async with Revocation(partial(authorizer.require_still, authorization, context)):
            await stream_responses()
        ```
    """

    def __init__(self, require_authorized: Callable[[], None] | None) -> None:
        self._require_authorized = require_authorized
        self._refusal: RadixKVError | None = None
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._require_authorized is not None:
            await self._limit.__aenter__()
            self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        if kind is GeneratorExit:  # the call was over before; there is nobody to raise to
            return
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._refusal is None:
                raise
        if self._refusal is not None and self._limit.expired():
            raise self._refusal

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def _check(self) -> None:
        assert self._require_authorized is not None
        try:
            self._require_authorized()
        except RadixKVError as refusal:
            self._refusal = refusal
            self._limit.reschedule(asyncio.get_running_loop().time())
        else:
            self._wait()
