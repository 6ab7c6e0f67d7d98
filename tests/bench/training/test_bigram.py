import math

import pytest

from bench.training.bigram import Bigram

VOCABULARY = 5
IDS = [0, 1, 2, 0, 1, 2, 0, 1, 3, 0, 1, 2]


def test_probabilities_add_up_to_one() -> None:
    bigram = Bigram(VOCABULARY)
    for learned in (False, True):
        if learned:
            bigram.learn(IDS)
        for previous in range(VOCABULARY):
            assert sum(bigram.probability(previous, token) for token in range(VOCABULARY)) == pytest.approx(1)


def test_it_learns_while_it_reads_as_it_learns_before() -> None:
    read, learned = Bigram(VOCABULARY), Bigram(VOCABULARY)
    read.bits(IDS)
    learned.learn(IDS)
    for previous in range(VOCABULARY):
        for token in range(VOCABULARY):
            assert read.probability(previous, token) == learned.probability(previous, token)


def test_before_any_text_all_tokens_are_equally_likely() -> None:
    assert Bigram(VOCABULARY).bits([0, 1]) == pytest.approx(math.log2(VOCABULARY))


def test_known_text_takes_fewer_bits_and_a_copy_learns_alone() -> None:
    bigram = Bigram(VOCABULARY)
    bigram.learn(IDS * 10)
    costs = [bigram.copy().bits(IDS) for _ in range(2)]
    assert costs[0] == costs[1] < 0.5 * Bigram(VOCABULARY).bits(IDS)
