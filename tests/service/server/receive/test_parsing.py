import random

import pytest
from google.protobuf.message import DecodeError

from radixkv.service.server.receive.parsing import PIECE_BYTES, parse_in_pieces
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest


def unpacked(count: int, number: int = 1) -> bytes:
    """Tokens with a tag each."""
    return b"".join(bytes([number << 3 | 5]) + index.to_bytes(4, "little") for index in range(count))


def length(payload: bytes, number: int) -> bytes:
    size, encoded = len(payload), bytearray([number << 3 | 2])
    while size >= 0x80:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*encoded, size]) + payload


TAIL = PrefillRequest(tenant="acme", request_id="r", top_logprobs=3).SerializeToString()
MESSAGES = {
    "packed": PrefillRequest(token_ids=range(50_000), tenant="a").SerializeToString(),
    "unpacked": unpacked(50_000) + TAIL,
    "mixed": unpacked(20_001) + TAIL + PrefillRequest(token_ids=range(30_000)).SerializeToString() + unpacked(7) + TAIL,
    "short": TAIL,
    "empty": b"",
    "unknown": b"".join(b"\xf8\x7f\x05" for _ in range(30_000)) + TAIL,
    "a group": TAIL + b"\x9b\x06\x08\x01\x9c\x06" + unpacked(100_000),
}


@pytest.mark.parametrize("data", MESSAGES.values(), ids=MESSAGES)
def test_pieces_give_what_the_whole_gives(data):
    assert parse_in_pieces(PrefillRequest(), data) == PrefillRequest.FromString(data)


@pytest.mark.parametrize("prompt", MESSAGES.values(), ids=MESSAGES)
def test_the_prompt_of_a_generation_is_cut_too(prompt):
    others = GenerateRequest(max_new_tokens=5, stop=["x"], logit_bias={3: 0.5})
    number = GenerateRequest.DESCRIPTOR.fields_by_name["prefill"].number
    data = length(prompt, number) + others.SerializeToString() + length(TAIL, number)
    assert parse_in_pieces(GenerateRequest(), data) == GenerateRequest.FromString(data)


def test_large_messages_are_parsed_piece_by_piece():
    sizes = []

    class Watched:
        DESCRIPTOR = PrefillRequest.DESCRIPTOR

        def MergeFromString(self, piece):  # noqa: N802
            sizes.append(len(piece))

    parse_in_pieces(Watched(), unpacked(100_000))
    assert sum(sizes) == 500_000
    assert max(sizes) <= 2 * PIECE_BYTES


def outcome(parse, data):
    try:
        return parse(data)
    except DecodeError:
        return DecodeError


def test_random_bytes_are_accepted_or_refused_as_by_parsing_at_once():
    numbers = random.Random(0)
    for _ in range(3000):
        data = bytearray(numbers.choice([TAIL, *MESSAGES.values()][:5])[: numbers.randrange(1, 300)])
        for _ in range(numbers.randrange(4)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        in_pieces = outcome(lambda data: parse_in_pieces(PrefillRequest(), data), bytes(data))
        assert in_pieces == outcome(PrefillRequest.FromString, bytes(data))


@pytest.mark.parametrize("cut", [1, 3, 4, 40_001])
def test_a_message_that_is_cut_off_is_refused(cut):
    with pytest.raises(DecodeError):
        parse_in_pieces(PrefillRequest(), MESSAGES["unpacked"][:-cut] if cut < 100 else MESSAGES["packed"][:cut])


def test_deeply_nested_messages_are_refused_as_by_parsing_at_once():
    number = GenerateRequest.DESCRIPTOR.fields_by_name["prefill"].number
    data = unpacked(20_000)
    for _ in range(200):
        data = length(data, number)
    assert outcome(lambda data: parse_in_pieces(GenerateRequest(), data), data) == outcome(
        GenerateRequest.FromString, data
    )
