import random

import pytest

from radixkv.service.text.stop_text import StopText


def shown(stops, pieces):
    """Return the text that is shown, and the stop string that ended it, or None."""
    text = StopText(stops)
    parts = []
    for piece in pieces:
        parts.append(text.put(piece))
        if text.matched is not None:
            return "".join(parts), text.matched
    return "".join([*parts, text.end()]), None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
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
def test_the_stop_string_that_begins_first_ends_the_text(stops, pieces, expected):
    assert shown(stops, pieces) == expected


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
    text, matched = shown(stops, pieces)
    # Of the strings that have ended with this piece, the first one counts; of several at one place, the longest.
    piece_end = next((end for end in [*cuts, 40] if any(stop in whole[:end] for stop in stops)), None)
    if piece_end is None:
        assert (text, matched) == (whole, None)
    else:
        ended = [stop for stop in stops if stop in whole[:piece_end]]
        expected = min(ended, key=lambda stop: (whole.find(stop), -len(stop)))
        assert (text, matched) == (whole[: whole.find(expected)], expected)
