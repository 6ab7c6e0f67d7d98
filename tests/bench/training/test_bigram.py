import math

import pytest

from bench.training.bigram import Bigram

VOCAB_SIZE = 5
IDS = [0, 1, 2, 0, 1, 2, 0, 1, 3, 0, 1, 2]


def test_probabilities_add_up_to_one() -> None:
    bigram = Bigram(VOCAB_SIZE)
    for has_learned in (False, True):
        if has_learned:
            bigram.learn(IDS)
        for previous in range(VOCAB_SIZE):
            assert sum(bigram.probability(previous, token) for token in range(VOCAB_SIZE)) == pytest.approx(1)


def test_counting_the_bits_of_a_text_learns_it_like_learning() -> None:
    read, learned = Bigram(VOCAB_SIZE), Bigram(VOCAB_SIZE)
    read.bits(IDS)
    learned.learn(IDS)
    for previous in range(VOCAB_SIZE):
        for token in range(VOCAB_SIZE):
            assert read.probability(previous, token) == learned.probability(previous, token)


def test_before_any_text_all_tokens_are_equally_likely() -> None:
    assert Bigram(VOCAB_SIZE).bits([0, 1]) == pytest.approx(math.log2(VOCAB_SIZE))


def test_learned_text_takes_fewer_bits_and_a_copy_learns_independently() -> None:
    bigram = Bigram(VOCAB_SIZE)
    bigram.learn(IDS * 10)
    first_bits, second_bits = (bigram.copy().bits(IDS) for _ in range(2))
    assert first_bits == second_bits < 0.5 * Bigram(VOCAB_SIZE).bits(IDS)
