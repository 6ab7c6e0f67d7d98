"""The window table finds the segments that contain passages of a prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from radixkv.doctor.window_table import WindowTable, _sampled_hashes

Tokens = npt.NDArray[np.uint32]


def random_tokens(length: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(50_000, size=length, dtype=np.uint32)


@pytest.mark.parametrize("offset", [0, 1, 63, 4000, 70_000])
def test_a_passage_is_found_at_any_position(offset: int) -> None:
    table, passage = WindowTable(), random_tokens(2000)
    table.add(np.concatenate((random_tokens(offset, seed=2), passage)), seed=7, segment_number=3)
    table.add(random_tokens(5000, seed=3), seed=7, segment_number=4)
    found = table.find(np.concatenate((random_tokens(37, seed=4), passage)), seed=7)
    assert found.most_common()[0][0] == 3
    assert found[3] >= 15


def test_the_sample_does_not_depend_on_what_surrounds_a_passage() -> None:
    tokens = random_tokens(200_000)
    whole = set(_sampled_hashes(tokens, seed=0, num_bits=6).tolist())
    part = set(_sampled_hashes(tokens[60_000:80_000], seed=0, num_bits=6).tolist())
    assert part <= whole
    assert 250 < len(part) < 400, "one of 64 windows is about 312"
    assert 2500 < len(whole) < 3800, "one of 64 windows is about 3,125"


def test_another_seed_finds_nothing() -> None:
    table, tokens = WindowTable(), random_tokens(5000)
    table.add(tokens, seed=1, segment_number=1)
    assert not table.find(tokens, seed=2)


def test_the_last_segment_of_a_passage_is_found() -> None:
    table, tokens = WindowTable(), random_tokens(5000)
    table.add(tokens, seed=1, segment_number=1)
    table.add(tokens[:2500], seed=1, segment_number=2)
    assert set(table.find(tokens[:2000], seed=1)) == {2}
    assert set(table.find(tokens[3000:], seed=1)) == {1}


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33])
def test_passages_of_less_than_two_windows_are_accepted(length: int) -> None:
    table = WindowTable()
    table.add(random_tokens(length), seed=1, segment_number=1)
    assert sum(table.find(random_tokens(length), seed=1).values()) <= 2


def test_a_small_table_forgets_old_segments() -> None:
    table = WindowTable(num_slots=64)
    for segment_number in range(100):
        table.add(random_tokens(1000, seed=segment_number), seed=1, segment_number=segment_number)
    assert sum(table.find(random_tokens(1000, seed=99), seed=1).values()) >= 8
    num_old_windows = 0
    for segment_number in range(50):
        num_old_windows += table.find(random_tokens(1000, seed=segment_number), seed=1).total()
    assert num_old_windows <= 5


def test_a_passage_that_repeats_a_token_takes_a_bounded_sample() -> None:
    counts = []
    for token in range(300):
        table, tokens = WindowTable(), np.full(50_000, token, np.uint32)
        table.add(tokens, seed=1, segment_number=1)
        counts.append(sum(table.find(tokens, seed=1).values()))
    assert 0 < max(counts) <= 65_536 // 8


def test_short_segments_have_more_windows_in_the_sample() -> None:
    tokens = random_tokens(4096)
    short, long = WindowTable(), WindowTable()
    short.add(tokens, seed=1, segment_number=1)
    long.add(np.concatenate((tokens, random_tokens(4096, seed=2))), seed=1, segment_number=1)
    assert 200 < short.find(tokens, seed=1)[1] < 320
    assert 40 < long.find(tokens, seed=1)[1] < 90


def test_a_text_that_repeats_its_words_is_found() -> None:
    table = WindowTable()
    for number in range(50):
        text = f"{number:04}" + "".join(f"Rule {line}: be kind to the reader of line {line}. " for line in range(12))
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        if number:
            assert table.find(tokens, seed=1)
        table.add(tokens, seed=1, segment_number=number)
