"""A grammar that is compiled on a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.structured.grammar_text import GrammarText

if TYPE_CHECKING:  # llguidance is needed only where a request has a grammar
    from radixkv.service.structured.matcher import GrammarConstraint


class Compilation:
    """A grammar that a thread compiles, and that any number of calls on an event loop wait for.

        queued ── begin ─▶ compiling ── end ─▶ over

    Args:
        text: the grammar as the caller wrote it.
        clock: a monotonic clock in seconds; thread-safe.

    Attributes:
        text: the grammar as the caller wrote it.
    """

    def __init__(self, text: GrammarText, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = text
        self._clock = clock
        self._started_s: Future[float] = Future()
        # An error is stored as a result, because asyncio would log an exception that no call retrieves.
        self._outcome: Future[GrammarConstraint | BaseException] = Future()

    @property
    def is_over(self) -> bool:
        """Whether compiling has succeeded or failed."""
        return self._outcome.done()

    def begin(self) -> None:
        """Record that compiling has begun."""
        self._started_s.set_result(self._clock())

    def end(self, outcome: GrammarConstraint | BaseException) -> None:
        """Set the result, or the error, for all waiting calls."""
        self._outcome.set_result(outcome)

    async def constraint(self, limit_s: float) -> GrammarConstraint:
        """Wait at most `limit_s` until compiling has begun, and then until it has ended or has taken `limit_s`.

        Raises:
            InvalidRequest: compiling takes longer than `limit_s`.
            QueueFull: the grammar is still queued after `limit_s`.
            BaseException: the error that compiling raised.
        """
        if not await _wait_until_done(self._started_s, limit_s):
            raise QueueFull(f"{self.text.field}: other grammars were compiled for {limit_s:g} s; try again later")
        if not await _wait_until_done(self._outcome, self._started_s.result() + limit_s - self._clock()):
            raise InvalidRequest(f"{self.text.field}: compiling it takes more than {limit_s:g} s; use a simpler one")
        outcome = self._outcome.result()
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)  # otherwise every raise would lengthen the traceback
        return outcome


async def _wait_until_done(future: Future[Any], limit_s: float) -> bool:
    """Wait at most `limit_s` for a future that a thread sets, and return whether it is done.

    If a call that waits for the future is cancelled, other calls still wait for it.
    """
    if not future.done():
        await asyncio.wait([asyncio.wrap_future(future)], timeout=limit_s)
    return future.done()
