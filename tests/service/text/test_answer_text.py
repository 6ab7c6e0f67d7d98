import random

import pytest

from radixkv.service.text.answer_text import AnswerText, StopText
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


def searched(stops, pieces):
    """Return the text that is shown, and the stop string that ended it, or None."""
    text = StopText(stops)
    parts = []
    for piece in pieces:
        parts.append(text.put(piece))
        if text.matched is not None:
            return "".join(parts), text.matched
    return "".join([*parts, text.end()]), None


@pytest.mark.parametrize(
    ("stops", "pieces", "result"),
    [
        (["b"], ["abc"], ("a", "b")),
        (["bc"], ["ab", "c"], ("a", "bc")),
        (["bcd"], ["ab", "c", "e", "bc"], ("abcebc", None)),
        (["cd", "bcde"], ["a", "bcd"], ("ab", "cd")),
        (["b", "bc"], ["abc"], ("a", "bc")),
        (["c", "b"], ["abc"], ("a", "b")),
        (["x"], [], ("", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["🎉€"], ["a🎉", "€b"], ("a", "🎉€")),
    ],
)
def test_the_stop_string_that_begins_first_ends_the_text(stops, pieces, result):
    assert searched(stops, pieces) == result


def test_text_that_may_belong_to_a_stop_string_is_held_back():
    text = StopText(["wxyz"])
    assert [text.put(letter) for letter in "abcdw"] == ["", "", "", "a", "b"]
    assert [text.put(letter) for letter in "xyz"] == ["c", "d", ""]
    assert text.matched == "wxyz"


def test_a_stop_string_that_ends_too_early_does_not_count():
    text = StopText(["ab"])
    assert text.put("xab", may_end=False) + text.put("cab") == "xabc"
    assert text.matched == "ab"


def test_a_stop_string_that_begins_early_and_ends_later_counts():
    text = StopText(["ab"])
    assert text.put("xa", may_end=False) + text.put("b") == "x"
    assert text.matched == "ab"


@pytest.mark.parametrize("seed", range(50))
def test_random_pieces_end_at_a_stop_string_of_the_first_piece_in_which_one_ends(seed):
    dice = random.Random(seed)
    whole = "".join(dice.choice("ab") for _ in range(40))
    stops = ["".join(dice.choice("ab") for _ in range(dice.randrange(3, 8))) for _ in range(dice.randrange(1, 4))]
    cuts = sorted(dice.sample(range(41), 10))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, 40], strict=True)]
    text, matched = searched(stops, pieces)
    # Of the strings that have ended with this piece, the first one counts; of several at one place, the longest.
    piece_end = next((end for end in [*cuts, 40] if any(stop in whole[:end] for stop in stops)), None)
    if piece_end is None:
        assert (text, matched) == (whole, None)
    else:
        ended = [stop for stop in stops if stop in whole[:piece_end]]
        expected = min(ended, key=lambda stop: (whole.find(stop), -len(stop)))
        assert (text, matched) == (whole[: whole.find(expected)], expected)
