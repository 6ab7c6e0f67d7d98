"""Writes answers with very many log probabilities while the event loop goes on."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator, Sequence

from radixkv.api.result import TokenLogprobs

# Numbers that are written at once, on the loop if an answer has no more: in less than 1 ms.
PIECE_NUMBERS = 1024
# Large answers that are written at the same time; each takes a thread.
_MOST_WRITTEN = 2


def num_numbers(rows: Sequence[TokenLogprobs]) -> int:
    """Count the log probabilities in rows, all of which are as long as the first one."""
    return len(rows) * (1 + len(rows[0].top)) if rows else 0


def runs(rows: Sequence[TokenLogprobs]) -> Iterator[slice]:
    """Cut rows into runs that are written at once."""
    num_rows = max(1, PIECE_NUMBERS // (1 + len(rows[0].top))) if rows else 1
    for start in range(0, len(rows), num_rows):
        yield slice(start, start + num_rows)


class AnswerWriter:
    """Joins the pieces of large answers on a thread, as they are made there.

    Protobuf keeps the interpreter to itself while it writes a message, so none of them may be large. One event loop
    uses it.
    """

    def __init__(self) -> None:
        self._writing = asyncio.Semaphore(_MOST_WRITTEN)

    async def joined(self, pieces: Iterable[bytes]) -> bytes:
        """Return the pieces of an answer, which are made while they are asked for, as one. A few wait for each other.

        Args:
            pieces: is iterated over on the thread.
        """
        await self._writing.acquire()
        written = asyncio.get_running_loop().run_in_executor(None, _joined, pieces)
        written.add_done_callback(lambda _: self._writing.release())
        return await asyncio.shield(written)  # the thread goes on although nobody waits any more


def _joined(pieces: Iterable[bytes]) -> bytes:
    buffer = io.BytesIO()  # which keeps the interpreter for one piece, where `join` would for all
    buffer.writelines(pieces)
    return buffer.getvalue()
