import random

import pytest

from radixkv.service.text.clean_up import CleanUp, clean_up_tokenization


@pytest.mark.parametrize("seed", range(100))
def test_the_result_does_not_depend_on_how_the_text_is_divided(seed):
    dice = random.Random(seed)
    pieces = ["".join(dice.choice(" .,'?ntvresmabc") for _ in range(dice.randrange(4))) for _ in range(40)]
    clean_up = CleanUp()
    assert "".join([*map(clean_up.put, pieces), clean_up.end()]) == clean_up_tokenization("".join(pieces))


def test_text_is_held_only_as_long_as_it_is_undecided():
    clean_up = CleanUp()
    assert [clean_up.put(each) for each in ("日", " ", "本", " ", ".", " n", "'", "t", " '", "x")] == [
        "日", "", " 本", "", ".", "", "", "n't", "", " 'x"
    ]  # fmt: skip
    assert clean_up.put("er ") == "e"
    assert clean_up.end() == "r "
