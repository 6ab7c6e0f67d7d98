import array
import struct
import tracemalloc
from collections import deque

import numpy as np
import pytest

from radixkv.service import token_ids
from radixkv.service.token_ids import MAX_TOKEN_ID, pack_token_ids, read_token_ids, write_token_ids
from radixkv.v1.prefill_pb2 import PrefillRequest, ProbeRequest

LENGTHS = [0, 1, 17, 31, 32, 37, 4095, 4096, 8192, 600_000]  # the length prefix takes 1 to 4 bytes


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, 300],
        (1, 2, 300),
        deque([1, 2, 300]),
        array.array("I", [1, 2, 300]),
        array.array("q", [1, 2, 300]),
        np.array([1, 2, 300], dtype=np.int32),
        np.array([1, 2, 300], dtype=np.uint16),
        np.array([1, 2, 300], dtype=">i8"),
        np.array([1, 9, 2, 9, 300, 9])[::2],
        [np.int64(1), 2, np.uint32(300)],
        PrefillRequest(token_ids=[1, 2, 300]).token_ids,
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_integer_sequence_packs_alike(token_ids):
    assert pack_token_ids(token_ids) == struct.pack("<3I", 1, 2, 300)


def test_torch_tensors_pack():
    torch = pytest.importorskip("torch")
    assert pack_token_ids(torch.tensor([1, 2, 300])) == struct.pack("<3I", 1, 2, 300)


def test_a_range_packs():
    assert pack_token_ids(range(3)) == struct.pack("<3I", 0, 1, 2)


@pytest.mark.parametrize("token_ids", [[], (), np.array([], dtype=np.int64), np.array([])])
def test_an_empty_sequence_packs_to_no_bytes(token_ids):
    assert pack_token_ids(token_ids) == b""


def test_the_largest_id_packs():
    assert pack_token_ids([MAX_TOKEN_ID]) == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("token_ids", [[1, -1], [2**32], [2**63], [2**64], np.array([-5], dtype=np.int8)])
def test_ids_outside_uint32_are_refused(token_ids):
    with pytest.raises(ValueError, match=r"token_ids: expected 0 to 4294967295, got"):
        pack_token_ids(token_ids)


@pytest.mark.parametrize("token_ids", [[[1, 2], [3, 4]], np.zeros((2, 2), dtype=int), [[1], [2, 3]]])
def test_ids_in_other_than_one_dimension_are_refused(token_ids):
    with pytest.raises(ValueError, match="token_ids: expected one dimension"):
        pack_token_ids(token_ids)


@pytest.mark.parametrize(
    "token_ids", [[1.0], np.array([1.5]), ["1"], "12", b"12", [None], [True], [2**64, "x"], 7, None, {1, 2}]
)
def test_values_other_than_integers_are_refused(token_ids):
    with pytest.raises(TypeError, match="token_ids: expected integers"):
        pack_token_ids(token_ids)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("message_type", [PrefillRequest, ProbeRequest])
def test_written_ids_are_read_back(message_type, length):
    packed = np.random.default_rng(length).integers(0, 2**32, length, dtype=np.uint32).astype("<u4").tobytes()
    message = message_type(tenant="acme", salt="s" * 200)
    write_token_ids(message, packed)
    assert len(message.token_ids) == length
    assert read_token_ids(message) == packed


def test_written_ids_are_the_ids_protobuf_would_write():
    message = PrefillRequest(tenant="acme")
    write_token_ids(message, pack_token_ids([1, 2, MAX_TOKEN_ID]))
    assert message == PrefillRequest(tenant="acme", token_ids=[1, 2, MAX_TOKEN_ID])


def test_reading_leaves_the_message_alone():
    message = PrefillRequest(tenant="acme", request_id="r", read_cache=False, top_logprobs=3, token_ids=[1, 2])
    before = message.SerializeToString()
    read_token_ids(message)
    assert message.SerializeToString() == before


def test_unpacked_ids_and_unknown_fields_are_read_too():
    unpacked = b"\x0d" + struct.pack("<I", 7) + b"\x0d" + struct.pack("<I", 8)  # field 1, fixed32, twice
    unknown = b"\xfa\x07\x03abc"  # field 127
    message = PrefillRequest.FromString(unknown + unpacked + PrefillRequest(token_ids=[9]).SerializeToString())
    assert read_token_ids(message) == struct.pack("<3I", 7, 8, 9)


def test_fields_in_another_order_are_read_too(monkeypatch):
    # Without this, the ids are found by the head of their field, where the serialized message usually has it.
    monkeypatch.setattr(token_ids, "length_head", lambda field_number, num_bytes: b"another field")
    message = PrefillRequest(tenant="acme", salt="s", token_ids=[1, 2, MAX_TOKEN_ID])
    assert read_token_ids(message) == struct.pack("<3I", 1, 2, MAX_TOKEN_ID)


def peak_bytes(function):
    """Return the peak of the memory that Python allocated during a call."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_creates_no_python_object_per_token():
    message = PrefillRequest(token_ids=range(8192), tenant="acme")
    read_token_ids(message)
    # The serialized message and a copy of its ids have 4 bytes per id; a Python object would have at least 32.
    assert peak_bytes(lambda: read_token_ids(message)) < 2.5 * 4 * 8192
    assert peak_bytes(lambda: list(message.token_ids)) > 32 * 8192
