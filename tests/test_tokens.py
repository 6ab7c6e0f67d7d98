from __future__ import annotations

import numpy as np
import pytest

from radixkv.tokens import shared_bytes
from tests.fakes import spell


@pytest.mark.parametrize(
    ("segment", "prompt", "num_tokens"),
    [
        ("", "abc", 0),
        ("abc", "", 0),
        ("abc", "abc", 3),
        ("abc", "abcd", 3),
        ("abcd", "abc", 3),
        ("abc", "abX", 2),
        ("abc", "Xbc", 0),
    ],
)
def test_shared_bytes_end_at_the_first_token_that_differs(segment: str, prompt: str, num_tokens: int) -> None:
    assert shared_bytes(spell(segment), spell(prompt), 0) == num_tokens * 4
    assert shared_bytes(spell(segment), spell("......." + prompt), 7 * 4) == num_tokens * 4


@pytest.mark.parametrize("difference", [0, 1, 17, 37, 4095, 4096, 4097, 36_863, 36_864, 36_865, 49_999])
def test_a_difference_in_a_long_segment_is_found_to_the_token(difference: int) -> None:
    segment = np.arange(50_000, dtype="<u4")
    other = segment.copy()
    other[difference] += 1
    assert shared_bytes(segment.tobytes(), b"...." + other.tobytes(), 4) == difference * 4
    assert shared_bytes(segment.tobytes(), b"...." + segment[:difference].tobytes(), 4) == difference * 4


def test_equal_bytes_of_different_tokens_do_not_count() -> None:
    assert shared_bytes(b"\1\0\0\0\4\3\2\1", b"\1\0\0\0\4\3\2\5", 0) == 4
