from __future__ import annotations

import numpy as np
import pytest

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs

# Rows with the log probability of the generated token, and those of two other tokens.
EXPECTED = tuple(
    TokenLogprobs(-0.5 * number, ((2**32 - 1 - number, -0.25), (number, -float("inf")))) for number in range(7)
)


def rows(start: int, end: int) -> LogprobRows:
    """Return the rows `[start, end)` of `EXPECTED`."""
    expected = EXPECTED[start:end]
    logprobs = [[row.logprob, *(logprob for _, logprob in row.top)] for row in expected]
    token_ids = [[token_id for token_id, _ in row.top] for row in expected]
    return LogprobRows(np.array(logprobs, np.float32), np.array(token_ids, np.uint32))


def test_a_table_behaves_like_any_other_sequence() -> None:
    table = LogprobTable(9)
    assert (len(table), table == ()) == (0, True)
    table.put(0, rows(0, 3))
    table.put(3, rows(3, 7))
    assert len(table) == 7
    assert table == EXPECTED
    assert table.__eq__(7) is NotImplemented
    assert (table[0], table[-1], list(table[2:5])) == (EXPECTED[0], EXPECTED[6], list(EXPECTED[2:5]))
    assert list(table) == list(EXPECTED)
    assert table != EXPECTED[:6]
    assert table != (*EXPECTED[:6], EXPECTED[0])
    with pytest.raises(IndexError):
        table[7]


def test_rows_that_are_put_twice_are_stored_once() -> None:
    table = LogprobTable(7)
    table.put(0, rows(0, 5))
    table.put(1, rows(1, 3))
    assert table == EXPECTED[:5]
    table.put(2, rows(2, 7))
    assert table == EXPECTED


def test_rows_without_top_logprobs_need_no_ids() -> None:
    table = LogprobTable(2)
    table.put(0, LogprobRows(np.array([[-1.0], [-2.0]], np.float32), np.empty((2, 0), np.uint32)))
    assert table == (TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ()))


@pytest.mark.parametrize("num_rows", [0, 2, 7])
def test_a_table_grows_beyond_its_initial_size(num_rows: int) -> None:
    table = LogprobTable(num_rows)
    for number in range(0, 6, 2):
        table.extend(EXPECTED[number : number + 2])
    table.extend(LogprobTable())
    last = LogprobTable()
    last.extend(EXPECTED[6:])
    table.extend(last)
    assert table == EXPECTED


def test_memory_is_at_most_one_and_a_half_times_eight_bytes_per_logprob() -> None:
    table = LogprobTable()
    for _ in range(130):
        table.extend((TokenLogprobs(-1.0, ((1, -1.0),) * 99),))
    num_logprobs = 130 * (1 + 99)
    assert table._logprobs.nbytes + table._token_ids.nbytes <= 1.5 * 8 * num_logprobs


def test_truncated_rows_are_removed_and_may_be_added_again() -> None:
    table = LogprobTable()
    table.extend(EXPECTED[:5])
    table.truncate(9)
    assert table == EXPECTED[:5]
    table.truncate(2)
    assert table == EXPECTED[:2]
    table.extend(EXPECTED[2:])
    assert table == EXPECTED
