from __future__ import annotations

import numpy as np
import pytest

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs

TOLD = tuple(
    TokenLogprobs(-0.5 * number, ((2**32 - 1 - number, -0.25), (number, -float("inf")))) for number in range(7)
)


def rows(start: int, end: int) -> LogprobRows:
    some = TOLD[start:end]
    logprobs = [[each.logprob, *(logprob for _, logprob in each.top)] for each in some]
    token_ids = [[token_id for token_id, _ in each.top] for each in some]
    return LogprobRows(np.array(logprobs, np.float32), np.array(token_ids, np.uint32))


def test_what_is_put_is_a_sequence_like_any_other() -> None:
    told = LogprobTable(9)
    assert (len(told), told == ()) == (0, True)
    told.put(0, rows(0, 3))
    told.put(3, rows(3, 7))
    assert len(told) == 7
    assert told == TOLD
    assert told.__eq__(7) is NotImplemented
    assert (told[0], told[-1], list(told[2:5])) == (TOLD[0], TOLD[6], list(TOLD[2:5]))
    assert list(told) == list(TOLD)
    assert told != TOLD[:6]
    assert told != (*TOLD[:6], TOLD[0])
    with pytest.raises(IndexError):
        told[7]


def test_rows_that_are_put_again_are_told_once() -> None:
    told = LogprobTable(7)
    told.put(0, rows(0, 5))
    told.put(1, rows(1, 3))
    assert told == TOLD[:5]
    told.put(2, rows(2, 7))
    assert told == TOLD


def test_nothing_but_a_tokens_own_needs_no_ids() -> None:
    told = LogprobTable(2)
    told.put(0, LogprobRows(np.array([[-1.0], [-2.0]], np.float32), np.empty((2, 0), np.uint32)))
    assert told == (TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ()))


@pytest.mark.parametrize("num_rows", [0, 2, 7])
def test_memory_for_more_tokens_is_taken_when_they_come(num_rows: int) -> None:
    told = LogprobTable(num_rows)
    for number in range(0, 6, 2):
        told.extend(TOLD[number : number + 2])
    told.extend(LogprobTable())
    last = LogprobTable()
    last.extend(TOLD[6:])
    told.extend(last)
    assert told == TOLD


def test_a_row_takes_eight_bytes_a_number_and_at_most_half_as_many_more() -> None:
    told = LogprobTable()
    for _ in range(130):
        told.extend((TokenLogprobs(-1.0, ((1, -1.0),) * 99),))
    assert told._logprobs.nbytes + told._token_ids.nbytes <= 1.5 * 130 * 8 * 100


def test_what_is_cut_off_is_told_no_more_and_may_be_told_again() -> None:
    told = LogprobTable()
    told.extend(TOLD[:5])
    told.truncate(9)
    assert told == TOLD[:5]
    told.truncate(2)
    assert told == TOLD[:2]
    told.extend(TOLD[2:])
    assert told == TOLD
