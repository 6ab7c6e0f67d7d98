import random

import pytest

from radixkv.service.text.text_stream import TextStream
from tests.service.text.tokenizers import byte_fallback, byte_level

FIRST_BYTE, HELLO, WORLD = 3, 260, 261  # token ids of `byte_fallback`
REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8


def pieces_of(tokenizer, token_ids, prompt_ids=()):
    stream = tokenizer.stream(prompt_ids)
    return [*(stream.put(token_id) for token_id in token_ids), stream.end()]


def random_characters(dice, count):
    """Return characters of one to four bytes in UTF-8."""
    ranges = ((32, 127), (0xA1, 0x800), (0x800, 0xD7FF), (0x10000, 0x10FFFF))
    return "".join(chr(dice.randrange(*dice.choice(ranges))) for _ in range(count)).replace(REPLACEMENT, "x")


@pytest.mark.parametrize("seed", range(60))
def test_the_text_is_that_of_all_tokens_together(seed):
    dice = random.Random(seed)
    tokenizer = byte_level()
    token_ids = tokenizer.encode(random_characters(dice, 60))
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(60))
def test_random_tokens_have_the_text_of_decoding_them_together(seed):
    dice = random.Random(seed)
    tokenizer = byte_level()
    end_id = dice.choice((512, 256, 128))  # all tokens, tokens of single bytes, or only ASCII
    first_id = dice.choice((0, 128)) if end_id == 256 else 0
    token_ids = [dice.randrange(first_id, end_id) for _ in range(300)]
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_is_returned_whole_with_its_last_byte():
    pieces = pieces_of(byte_level(), "a🎉b€".encode())
    assert pieces == ["a", "", "", "", "🎉", "b", "", "", "€", ""]


def test_an_incomplete_character_is_returned_at_the_end():
    assert pieces_of(byte_level(), b"a\xe2\x82") == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_bytes_that_never_become_text_are_not_held_for_ever(tokenizer):
    stream = tokenizer().stream()
    first = 0 if tokenizer is byte_level else FIRST_BYTE
    pieces = [stream.put(first + 0xFF) for _ in range(500)]
    assert len(stream._ids) <= 32
    assert len("".join(pieces)) > 480


@pytest.mark.parametrize("seed", range(40))
def test_characters_whose_bytes_are_tokens_are_returned_whole(seed):
    dice = random.Random(seed)
    tokenizer = byte_fallback()
    text = "Hello" + random_characters(dice, 30) + " world"
    token_ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_blank_at_the_start_is_kept_only_after_a_prompt():
    tokenizer = byte_fallback()
    assert pieces_of(tokenizer, [HELLO, WORLD]) == ["Hello", " world", ""]
    assert pieces_of(tokenizer, [WORLD], prompt_ids=[HELLO]) == [" world", ""]
    assert pieces_of(tokenizer, [WORLD]) == ["world", ""]


def test_special_tokens_have_no_text_and_change_nothing():
    tokenizer = byte_level()
    token_ids = [*b"a\xe2", 511, *b"\x82\xac", 509, 510, *b"b", 511]
    assert tokenizer.decode(token_ids) == "a€b"
    assert "".join(pieces_of(tokenizer, token_ids)) == "a€b"
    fallback = byte_fallback()
    assert "".join(pieces_of(fallback, [HELLO, 2, 2, 1, WORLD])) == "Hello world"


def test_the_text_of_the_prompt_is_not_returned():
    tokenizer = byte_level()
    prompt = tokenizer.encode("a prompt that is long enough to be cut €")
    assert "".join(pieces_of(tokenizer, [*b"b"], prompt)) == "b"
    assert "".join(pieces_of(tokenizer, [*b"\x82\xac"], [*b"x\xe2"])) == "€"


def test_many_special_tokens_are_not_kept():
    stream = byte_level().stream()
    assert {stream.put(511) for _ in range(200)} == {""}
    assert len(stream._ids) <= 32
    assert stream.put(ord("a")) == "a"


@pytest.mark.parametrize("seed", range(60))
def test_the_last_tokens_have_the_same_text_together_as_one_by_one(seed):
    dice = random.Random(seed)
    tokenizer = byte_level()
    shown = {511: "<end>", 65: "<a>"} if seed % 2 else {}
    token_ids = [dice.randrange(dice.choice((512, 256, 128))) for _ in range(80)] + [511] * (seed % 3)
    num_first = dice.randrange(80)
    one_by_one, together = tokenizer.stream(b"x\xe2", shown), tokenizer.stream(b"x\xe2", shown)
    expected = "".join([*map(one_by_one.put, token_ids), one_by_one.end()])
    assert "".join(map(together.put, token_ids[:num_first])) + together.finish(token_ids[num_first:]) == expected


def test_the_last_tokens_are_decoded_once():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    stream = TextStream(decode)
    assert stream.finish([*b"a text of some tokens"]) == "a text of some tokens"
    assert sum(decoded) == len(b"a text of some tokens")
