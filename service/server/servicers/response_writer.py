"""Serializes responses with very many log probabilities without blocking the event loop."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from radixkv.api.result import TokenLogprobs
from radixkv.service.server.thread_call import call_on_thread
from radixkv.v1 import prefill_pb2

# Number of log probabilities that are serialized at once, in less than 1 ms. Responses with no more than this are
# serialized on the event loop.
PIECE_LOGPROBS = 1024
# Large responses that are serialized at the same time; each occupies a thread.
_MAX_WRITING = 2


def num_logprobs(rows: Sequence[TokenLogprobs]) -> int:
    """Return the number of log probabilities in rows, all of which are as long as the first one."""
    return len(rows) * (1 + len(rows[0].top)) if rows else 0


def row_slices(rows: Sequence[TokenLogprobs] | Sequence[prefill_pb2.TokenLogprobs]) -> Iterator[slice]:
    """Yield the slices of rows that are serialized at once."""
    num_rows = max(1, PIECE_LOGPROBS // (1 + len(rows[0].top))) if rows else 1
    for start in range(0, len(rows), num_rows):
        yield slice(start, start + num_rows)


class ResponseWriter:
    """Serializes large responses piece by piece on a thread. For use on one event loop.

    Protobuf holds the GIL while it serializes a message, so no single message may be large.
    """

    def __init__(self) -> None:
        self._write_slots = asyncio.Semaphore(_MAX_WRITING)

    async def join(self, pieces: Iterable[bytes]) -> bytes:
        """Concatenate the pieces of a response. At most two responses are written at the same time.

        Args:
            pieces: an iterable that serializes one piece at a time; it is iterated on the thread.
        """
        await self._write_slots.acquire()
        return await call_on_thread(partial(_join, pieces), self._write_slots.release)


def _join(pieces: Iterable[bytes]) -> bytes:
    buffer = io.BytesIO()  # holds the GIL for one piece at a time; `bytes.join` would hold it for all
    buffer.writelines(pieces)
    return buffer.getvalue()
