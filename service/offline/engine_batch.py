"""Runs the requests of one call through the engine together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from radixkv.api.result import GeneratedTokens, OnTokens
from radixkv.errors import QueueFull

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

Result = TypeVar("Result")
Output = TypeVar("Output")
Start = Callable[[OnTokens], Future[Result]]

# A progress bar that the caller did not request appears after this many seconds.
_PROGRESS_DELAY_S = 2.0


class EngineBatch(Generic[Result, Output]):
    """The requests of one call. For use by one thread.

    Args:
        engine: computes them.
        max_unfinished: maximum number of requests that are queued or running at the same time.
        add: called with the index of a request and its new tokens.
        end: called with the index of a request that has ended and its result. Returns what `run` returns for it.
    """

    def __init__(
        self,
        engine: Engine,
        max_unfinished: int,
        add: Callable[[int, GeneratedTokens], object],
        end: Callable[[int, Result], Output],
    ) -> None:
        self._engine = engine
        self._max_unfinished = max_unfinished
        self._add = add
        self._end = end
        self._events: SimpleQueue[tuple[int, GeneratedTokens | None]] = SimpleQueue()  # None: the request has ended

    def run(self, starts: Sequence[Start[Result]]) -> list[Output]:
        """Run requests, and wait until all of them have ended. If one fails, the others are cancelled.

        Args:
            starts: each queues a request. Its argument is to be called with new tokens, on any thread.

        Returns:
            The outputs, in the order of the requests.

        Raises:
            RadixKVError: a request was refused, or failed.
        """
        futures: list[Future[Result]] = []
        outputs: dict[int, Output] = {}
        try:
            while len(outputs) < len(starts):
                self._start_some(starts, futures, len(outputs))
                index, tokens = self._events.get()
                if tokens is not None:
                    self._add(index, tokens)
                elif futures[index].cancelled():
                    raise self._engine.cancellation
                else:
                    outputs[index] = self._end(index, futures[index].result(0))
        finally:  # also if the caller is interrupted
            for future in futures:
                future.cancel()
        return [outputs[index] for index in range(len(starts))]

    def _start_some(self, starts: Sequence[Start[Result]], futures: list[Future[Result]], num_ended: int) -> None:
        while len(futures) < len(starts) and len(futures) - num_ended < self._max_unfinished:
            index = len(futures)
            try:
                future = starts[index](self._token_queue(index))
            except QueueFull:  # because of the requests of other threads
                if len(futures) == num_ended:
                    raise
                return
            futures.append(future)
            future.add_done_callback(self._end_queue(index))

    def _token_queue(self, index: int) -> OnTokens:
        return lambda tokens: self._events.put((index, tokens))

    def _end_queue(self, index: int) -> Callable[[Future[Any]], None]:
        return lambda _: self._events.put((index, None))


@contextlib.contextmanager
def progress_bar(num_requests: int, wanted: bool | None, description: str) -> Iterator[Callable[[], object]]:
    """Show a progress bar on stderr for the time of a block. Yields a function to call when a request has ended.

    Args:
        num_requests: number of requests.
        wanted: whether to show it; None to show it on a terminal if the requests take more than two seconds.
        description: what is done with the requests.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda: None
        return
    from tqdm import tqdm

    delay_s = _PROGRESS_DELAY_S if wanted is None else 0.0
    with tqdm(total=num_requests, desc=description, unit=" requests", disable=False, delay=delay_s) as bar:
        yield bar.update
