"""Parses large messages in pieces, so that the GIL is released in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

# Protobuf holds the GIL while it parses; 65,536 bytes take at most 0.4 ms.
PIECE_BYTES = 65_536

# Maximum depth of nested messages that are cut as well: the tokens of a GenerateRequest are in its field `prefill`.
_MAX_LEVELS = 2

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4}


def parse_in_pieces(message: Message, data: bytes) -> Message:
    """Parse a message piece by piece, with the same result as parsing it at once.

    Protobuf merges messages that are concatenated in one buffer, so a message may be cut between any two of its fields.
    A single field is cut only if it is a message that is neither repeated nor in a oneof. Packed tokens are not cut.

    Args:
        message: an empty message, which is filled.
        data: the serialized message.

    Returns:
        The message.

    Raises:
        DecodeError: the data cannot be parsed.
    """
    for piece in _pieces(memoryview(data), cast("Descriptor", message.DESCRIPTOR), _MAX_LEVELS):
        message.MergeFromString(bytes(piece))
    return message


def _pieces(data: memoryview, kind: Descriptor, num_levels: int) -> Iterator[bytes | memoryview]:
    start = at = 0
    while at < len(data):
        end, number, payload = _field(data, at)
        nested_type = _mergeable_type(kind.fields_by_number.get(number))
        if payload is not None and len(payload) > PIECE_BYTES and num_levels and nested_type is not None:
            if start < at:
                yield data[start:at]
            for part in _pieces(payload, nested_type, num_levels - 1):
                yield _varint(number << 3 | _LENGTH) + _varint(len(part)) + bytes(part)
            start = at = end
            continue
        if payload is None:
            end = _run_end(data, at, end)
        at = end
        if at - start >= PIECE_BYTES:
            yield data[start:at]
            start = at
    if start < at:
        yield data[start:at]


def _mergeable_type(field: FieldDescriptor | None) -> Descriptor | None:
    """Return the type of a singular message field, whose occurrences protobuf merges; None for other fields.

    The message of a oneof is not cut.
    """
    if field is None or field.type != FieldDescriptor.TYPE_MESSAGE:
        return None
    return None if field.is_repeated or field.containing_oneof is not None else field.message_type


def _field(data: memoryview, at: int) -> tuple[int, int, memoryview | None]:
    """Return where the field at this offset ends, its number, and its payload if it is length-delimited.

    A group, or a field with an invalid wire type, is taken to extend to the end of the data, and is left to protobuf.

    Raises:
        DecodeError: the field is incomplete, or a varint has more than 10 bytes.
    """
    key, after = _read_varint(data, at)
    kind = key & 7
    if kind == _VARINT:
        return _read_varint(data, after)[1], key >> 3, None
    if kind == _LENGTH:
        length, after = _read_varint(data, after)
        end = after + length
        payload = data[after:end]
    else:
        end = after + _NUM_BYTES[kind] if kind in _NUM_BYTES else len(data)
        payload = None
    if end > len(data):
        raise DecodeError("the last field is incomplete")
    return end, key >> 3, payload


def _run_end(data: memoryview, at: int, end: int) -> int:
    """Return where a run of fields with the same tag ends, if their size is fixed; at most one piece further."""
    if data[at] & 7 not in _NUM_BYTES:
        return end
    width = end - at
    num_head = width - _NUM_BYTES[data[at] & 7]
    num_rows = min(PIECE_BYTES, len(data) - at) // width
    rows = np.frombuffer(data[at : at + num_rows * width], dtype=np.uint8).reshape(-1, width)[:, :num_head]
    differs = (rows != rows[:1]).any(axis=1)
    return at + width * (int(differs.argmax()) if differs.any() else max(1, num_rows))


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise DecodeError("a varint is incomplete or longer than 10 bytes")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
