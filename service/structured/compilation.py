"""A text that is compiled beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.structured.grammar_text import GrammarText

if TYPE_CHECKING:  # llguidance is needed where somebody asks for it
    from radixkv.service.structured.matcher import GrammarConstraint


class Compilation:
    """A text that a thread compiles, and any number of callers on event loops wait for.

        waits for its turn ── begin ─▶ is compiled ── end ─▶ is over

    Args:
        text: as the caller wrote it.
        clock: seconds, never going back. Any thread may ask it.

    Attributes:
        text: see above.
    """

    def __init__(self, text: GrammarText, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = text
        self._clock = clock
        self._begun_s: Future[float] = Future()
        # An error is a result too: nobody may wait for it any more, and asyncio would log it then.
        self._outcome: Future[GrammarConstraint | BaseException] = Future()

    @property
    def is_over(self) -> bool:
        """Whether there is a constraint, or an error."""
        return self._outcome.done()

    def begin(self) -> None:
        """Note that its turn has come."""
        self._begun_s.set_result(self._clock())

    def end(self, outcome: GrammarConstraint | BaseException) -> None:
        """Tell all who wait what came of it."""
        self._outcome.set_result(outcome)

    async def constraint(self, limit_s: float) -> GrammarConstraint:
        """Wait for its turn, and then until it is compiled. Neither may take longer than `limit_s`.

        Raises:
            InvalidRequest: it takes longer to compile.
            QueueFull: its turn did not come.
            BaseException: the error that it ended with.
        """
        if not await _is_done(self._begun_s, limit_s):
            raise QueueFull(f"{self.text.field}: expected its turn in {limit_s:g} s, got others before it")
        if not await _is_done(self._outcome, self._begun_s.result() + limit_s - self._clock()):
            raise InvalidRequest(
                f"{self.text.field}: expected one that is compiled in {limit_s:g} s, got one that takes longer"
            )
        outcome = self._outcome.result()
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)  # each time it is raised would lengthen it
        return outcome


async def _is_done(future: Future[Any], limit_s: float) -> bool:
    """Wait for what a thread sets, but no longer than `limit_s`. A caller that goes away takes nothing from others."""
    if not future.done():
        await asyncio.wait([asyncio.wrap_future(future)], timeout=limit_s)
    return future.done()
