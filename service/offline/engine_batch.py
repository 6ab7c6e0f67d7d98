"""Runs the requests of one call through the engine together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from radixkv.api.result import GeneratedTokens, OnTokens
from radixkv.errors import QueueFull
from radixkv.service.offline.request_slots import CallSlots, RequestSlots

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

Result = TypeVar("Result")
Output = TypeVar("Output")
Start = Callable[[OnTokens], Future[Result]]

# Until a cancelled request has ended, it counts as unfinished in the engine; that takes at most a step.
_RETRY_S = 0.005


class EngineBatch(Generic[Result, Output]):
    """The requests of one call. For use by one thread.

    If other threads have calls too, each call gets an equal share of the requests that may be unfinished.

    Args:
        engine: computes the requests.
        slots: bound the number of requests that are queued or running at the same time.
        add: called with the index of a request and its new tokens.
        end: called with the index of a request that has ended and its result. Returns what `run` returns for it.
    """

    def __init__(
        self,
        engine: Engine,
        slots: RequestSlots,
        add: Callable[[int, GeneratedTokens], object],
        end: Callable[[int, Result], Output],
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._add = add
        self._end = end
        self._events: SimpleQueue[tuple[int, GeneratedTokens | None]] = SimpleQueue()  # None: the request has ended

    def run(self, starts: Sequence[Start[Result]]) -> list[Output]:
        """Run requests, and wait until all of them have ended. If one fails, the others are cancelled.

        Args:
            starts: functions that queue one request each. Their argument is called with new tokens, on any thread.

        Returns:
            The outputs, in the order of the requests.

        Raises:
            RadixKVError: a request was refused, or failed.
        """
        futures: list[Future[Result]] = []
        outputs: dict[int, Output] = {}
        with self._slots.call() as slots:
            try:
                while len(outputs) < len(starts):
                    self._start_requests(slots, starts, futures, len(outputs))
                    index, tokens = self._events.get()
                    if tokens is not None:
                        self._add(index, tokens)
                    elif futures[index].cancelled():
                        raise self._engine.cancellation
                    else:
                        outputs[index] = self._end(index, futures[index].result(0))
                        slots.release()
            finally:  # also if the caller is interrupted
                for future in futures:
                    future.cancel()
        return [outputs[index] for index in range(len(starts))]

    def _start_requests(
        self, slots: CallSlots, starts: Sequence[Start[Result]], futures: list[Future[Result]], num_ended: int
    ) -> None:
        """Start as many further requests as the slots allow, and add their futures to `futures`."""
        # A request that was refused keeps its slot for the next attempt.
        while len(futures) < len(starts) and (slots.num_taken > len(futures) - num_ended or slots.take()):
            index = len(futures)
            try:
                future = starts[index](self._tokens_callback(index))
            except QueueFull:  # the engine still counts cancelled requests, which have no slots any more
                # While other requests of this call run, the next event leads to another attempt.
                if len(futures) > num_ended:
                    return
                time.sleep(_RETRY_S)
                continue
            futures.append(future)
            future.add_done_callback(self._end_callback(index))

    def _tokens_callback(self, index: int) -> OnTokens:
        return lambda tokens: self._events.put((index, tokens))

    def _end_callback(self, index: int) -> Callable[[Future[Any]], None]:
        return lambda _: self._events.put((index, None))
