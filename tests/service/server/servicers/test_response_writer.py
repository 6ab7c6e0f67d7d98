from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from radixkv.api.result import TokenLogprobs
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter, num_logprobs, row_slices
from tests.patience import PATIENCE_S
from tests.service.serving import becomes_true


class GatedPieces:
    """Pieces of which the second one waits for `open` to be set."""

    def __init__(self) -> None:
        self.has_begun, self.open = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.has_begun.set()
        yield b"one "
        assert self.open.wait(PATIENCE_S)
        yield b"two"


@pytest.mark.parametrize(("num_rows", "num_top"), [(0, 0), (1, 0), (1500, 0), (3000, 2), (5, 2 * PIECE_LOGPROBS)])
def test_slices_have_all_rows_and_each_has_at_most_a_piece_of_log_probabilities(num_rows: int, num_top: int) -> None:
    rows = [TokenLogprobs(-float(number), ((7, -1.0),) * num_top) for number in range(num_rows)]
    pieces = [rows[each] for each in row_slices(rows)]
    assert [row for piece in pieces for row in piece] == rows
    assert all(num_logprobs(piece) <= PIECE_LOGPROBS or len(piece) == 1 for piece in pieces)
    assert num_logprobs(rows) == num_rows * (1 + num_top)


def test_the_loop_continues_while_pieces_are_written() -> None:
    async def run() -> bytes:
        pieces = GatedPieces()
        written = asyncio.create_task(ResponseWriter().join(pieces))
        assert await becomes_true(pieces.has_begun.is_set)
        pieces.open.set()
        return await written

    assert asyncio.run(run()) == b"one two"


def test_two_responses_are_written_at_a_time_even_if_their_callers_are_gone() -> None:
    async def run() -> None:
        writer, (first, second, third) = ResponseWriter(), [GatedPieces() for _ in range(3)]
        tasks = [asyncio.create_task(writer.join(pieces)) for pieces in (first, second, third)]
        assert await becomes_true(lambda: first.has_begun.is_set() and second.has_begun.is_set())
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not third.has_begun.is_set(), "the thread of the first response still writes"
        first.open.set()
        assert await becomes_true(third.has_begun.is_set)
        second.open.set()
        third.open.set()
        assert await asyncio.gather(*tasks[1:]) == [b"one two"] * 2

    asyncio.run(run())
