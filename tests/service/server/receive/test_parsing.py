import random

import pytest
from google.protobuf.message import DecodeError

from radixkv.service.server.receive.parsing import PIECE_BYTES, parse_in_pieces
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest

FIXED32, LENGTH_DELIMITED = 5, 2  # wire types
TOKEN_IDS_FIELD = 1


def unpacked(num_tokens: int) -> bytes:
    """Encode token ids that are not packed: each has a tag."""
    tag = bytes([TOKEN_IDS_FIELD << 3 | FIXED32])
    return b"".join(tag + token_id.to_bytes(4, "little") for token_id in range(num_tokens))


def submessage(payload: bytes, field: int) -> bytes:
    """Encode a field that contains a message: its tag, its size as a varint, and its bytes."""
    size, encoded = len(payload), bytearray([field << 3 | LENGTH_DELIMITED])
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
    "an unknown field": b"".join(b"\xf8\x7f\x05" for _ in range(30_000)) + TAIL,
    "a group": TAIL + b"\x9b\x06\x08\x01\x9c\x06" + unpacked(100_000),
}


@pytest.mark.parametrize("data", MESSAGES.values(), ids=MESSAGES)
def test_pieces_give_what_the_whole_gives(data):
    assert parse_in_pieces(PrefillRequest(), data) == PrefillRequest.FromString(data)


@pytest.mark.parametrize("prompt", MESSAGES.values(), ids=MESSAGES)
def test_the_prompt_of_a_generation_is_cut_too(prompt):
    others = GenerateRequest(max_new_tokens=5, stop=["x"], logit_bias={3: 0.5})
    field = GenerateRequest.DESCRIPTOR.fields_by_name["prefill"].number
    data = submessage(prompt, field) + others.SerializeToString() + submessage(TAIL, field)
    assert parse_in_pieces(GenerateRequest(), data) == GenerateRequest.FromString(data)


def test_large_messages_are_parsed_piece_by_piece():
    sizes = []

    class RecordingMessage:
        DESCRIPTOR = PrefillRequest.DESCRIPTOR

        def MergeFromString(self, piece):  # noqa: N802
            sizes.append(len(piece))

    parse_in_pieces(RecordingMessage(), unpacked(100_000))
    assert sum(sizes) == 500_000
    assert max(sizes) <= 2 * PIECE_BYTES


def outcome(parse, data):
    """Return the parsed message, or the class of the error."""
    try:
        return parse(data)
    except DecodeError:
        return DecodeError


def test_random_bytes_are_accepted_or_refused_as_by_parsing_at_once():
    rng = random.Random(0)
    messages = [TAIL, MESSAGES["packed"], MESSAGES["unpacked"], MESSAGES["mixed"], MESSAGES["short"]]
    for _ in range(3000):
        data = bytearray(rng.choice(messages)[: rng.randrange(1, 300)])
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        in_pieces = outcome(lambda data: parse_in_pieces(PrefillRequest(), data), bytes(data))
        assert in_pieces == outcome(PrefillRequest.FromString, bytes(data))


@pytest.mark.parametrize(
    "data",
    [MESSAGES["unpacked"][:-1], MESSAGES["unpacked"][:-3], MESSAGES["unpacked"][:-4], MESSAGES["packed"][:40_001]],
    ids=["without the last byte", "without 3 bytes", "without 4 bytes", "in packed tokens"],
)
def test_a_message_that_is_cut_off_is_refused(data):
    with pytest.raises(DecodeError):
        parse_in_pieces(PrefillRequest(), data)


def test_deeply_nested_messages_are_refused_as_by_parsing_at_once():
    field = GenerateRequest.DESCRIPTOR.fields_by_name["prefill"].number
    data = unpacked(20_000)
    for _ in range(200):
        data = submessage(data, field)
    assert outcome(lambda data: parse_in_pieces(GenerateRequest(), data), data) == outcome(
        GenerateRequest.FromString, data
    )
