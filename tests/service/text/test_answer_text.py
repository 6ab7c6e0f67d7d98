import random

import pytest

from radixkv.service.text.answer_text import AnswerText
from tests.service.text.tokenizers import byte_fallback, byte_level


def text_of(answer, token_ids, piece_size=1):
    """Return the text that an answer sends for tokens that arrive in pieces of `piece_size`."""
    parts = [answer.put(token_ids[start : start + piece_size]) for start in range(0, len(token_ids), piece_size)]
    return "".join([*parts, answer.end()])


def expected(tokenizer, token_ids, stops, min_tokens):
    """Return the text, the number of its tokens, and the stop string that ends it or None.

    All tokens are decoded again after each one.
    """
    longest = 0  # an incomplete character makes the bytes before it unreadable too, until it is complete
    for count in range(1, len(token_ids) + 1):
        num_before, shown = longest, tokenizer.decode(token_ids[:count]).rstrip("\ufffd")
        longest = max(longest, len(shown))
        if count <= min_tokens:
            continue
        ends = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(shown))
            if shown.startswith(stop, start) and start + len(stop) > num_before
        ]
        if ends:
            start, _, stop = min(ends)
            return shown[:start], count, stop
    return tokenizer.decode(token_ids), len(token_ids), None


@pytest.mark.parametrize("seed", range(150))
def test_random_answers_end_where_decoding_all_tokens_again_finds_a_stop_string(seed):
    dice = random.Random(seed)
    tokenizer = dice.choice((byte_level, byte_fallback))()
    alphabet = ["a", "b", " a", " b", "é", "€", "🎉", ", "]
    text = "".join(dice.choice(alphabet) for _ in range(40))
    token_ids = tokenizer.encode("x" + text)
    stops = ["".join(dice.choice(alphabet) for _ in range(dice.randrange(1, 4))) for _ in range(dice.randrange(1, 4))]
    min_tokens = dice.choice((0, 0, 5, 60))
    text, num_tokens, matched = expected(tokenizer, token_ids, stops, min_tokens)
    answer = AnswerText(tokenizer.stream(), stops, min_tokens)
    assert text_of(answer, token_ids, piece_size=dice.choice((1, 3, 1000))) == text
    assert (answer.num_tokens, answer.matched) == (num_tokens, matched)


def test_a_stop_string_that_spans_tokens_is_found():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("the requests and the blocks")
    assert len(token_ids) < 20
    answer = AnswerText(tokenizer.stream(), ["ts and t"])
    assert text_of(answer, token_ids) == "the reques"
    assert answer.num_tokens < len(token_ids)


def test_a_token_may_have_more_text_than_the_stop_string():
    tokenizer = byte_level()
    (token_id,) = tokenizer.encode(" the")
    answer = AnswerText(tokenizer.stream(), ["t"])
    assert text_of(answer, [97, token_id, 98]) == "a "
    assert (answer.num_tokens, answer.matched) == (2, "t")


def test_a_stop_string_with_characters_of_several_tokens_is_found_with_its_last_byte():
    answer = AnswerText(byte_level().stream(), ["€"])
    assert text_of(answer, [*b"a\xe2\x82\xacb"]) == "a"
    assert answer.num_tokens == 4


def test_without_stop_strings_all_text_is_sent_as_it_arrives():
    answer = AnswerText(byte_level().stream())
    assert [answer.put([each]) for each in b"a\xe2\x82"] == ["a", "", ""]
    assert (answer.end(), answer.matched, answer.num_tokens) == ("\ufffd", None, 3)


def test_a_stop_string_may_begin_before_a_special_token_and_end_after_it():
    answer = AnswerText(byte_level().stream(), ["ab"])
    assert text_of(answer, [*b"xa", 511, *b"bc"]) == "x"
    assert answer.num_tokens == 4


@pytest.mark.parametrize("stops", [(), ("b",)])
def test_the_last_tokens_may_be_added_together(stops):
    tokenizer = byte_level()
    one_by_one, together = (AnswerText(tokenizer.stream(), stops) for _ in range(2))
    token_ids = tokenizer.encode("a text € about everything")
    expected = one_by_one.put(token_ids) + one_by_one.end()
    assert together.put(token_ids[:4]) + together.finish(token_ids[4:]) == expected
    assert (together.num_tokens, together.matched) == (one_by_one.num_tokens, one_by_one.matched)
