"""Turns of token streams, so that many streams do not delay other calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from radixkv.service.server.receive.fair_shares import QuotaKey


class StreamTurns:
    """Lets one token stream continue in each iteration of the event loop, so that calls do not wait for all streams.

    A step of the engine generates a token for every running completion, so all streams have new tokens at the same
    time. Without turns, each iteration of the event loop would send a chunk of every stream. A new call takes several
    iterations, and would wait for all streams in each of them:

        without   | all streams, call | all streams, call | all streams, call | ...
        with      | a stream, call | a stream, call | a stream, call | ...

    Quota keys take turns, and so do the streams of one key. If a stream is cancelled before it has used its turn, the
    next stream of the same key gets the next turn. The tokens of a stream that waits accumulate and are sent as one
    chunk, so the more streams there are, the fewer chunks are sent per token. For use on one event loop.
    """

    def __init__(self) -> None:
        self._is_taken = False  # whether a stream has the turn of this iteration
        # Waiting streams by key; keys and streams are in the order of their turns.
        self._queues: OrderedDict[QuotaKey, deque[asyncio.Future[None]]] = OrderedDict()

    async def wait(self, key: QuotaKey) -> None:
        """Wait until a stream of a quota key may send its next chunk.

        Complexity: O(1).
        """
        if not self._is_taken:
            self._take_turn()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and key in self._queues:  # the stream had the turn
                self._queues.move_to_end(key, last=False)
            raise

    def _take_turn(self) -> None:
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        """Let the next stream continue, in the next iteration of the event loop."""
        self._is_taken = False
        while self._queues and not self._is_taken:
            key, queue = self._queues.popitem(last=False)
            while queue and not self._is_taken:
                turn = queue.popleft()
                if not turn.done():  # otherwise its call was cancelled
                    turn.set_result(None)
                    self._take_turn()
            if queue:
                self._queues[key] = queue  # its next turn comes after those of the other keys
