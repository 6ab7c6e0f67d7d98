"""Parses large messages in pieces, so that the GIL is released in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from radixkv.service.token_ids import encode_varint

# Protobuf holds the GIL while it parses; 65,536 bytes take at most 0.4 ms.
PIECE_BYTES = 65_536

# Maximum depth of nested messages that are cut as well: the tokens of a GenerateRequest are in its field `prefill`.
_MAX_LEVELS = 2

# Wire types of protobuf.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4}


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
    for piece in _cut_pieces(memoryview(data), cast("Descriptor", message.DESCRIPTOR), _MAX_LEVELS):
        message.MergeFromString(bytes(piece))
    return message


def _cut_pieces(data: memoryview, message_type: Descriptor, num_levels: int) -> Iterator[bytes | memoryview]:
    """Yield serialized messages that protobuf merges into the message `data`, cut down to a number of nested levels."""
    start = offset = 0
    while offset < len(data):
        end, field_number, payload = _read_field(data, offset)
        nested_type = _mergeable_type(message_type.fields_by_number.get(field_number))
        if payload is not None and len(payload) > PIECE_BYTES and num_levels and nested_type is not None:
            if start < offset:
                yield data[start:offset]
            for nested_piece in _cut_pieces(payload, nested_type, num_levels - 1):
                yield (
                    encode_varint(field_number << 3 | _LENGTH) + encode_varint(len(nested_piece)) + bytes(nested_piece)
                )
            start = offset = end
            continue
        if payload is None:
            end = _run_end(data, offset, end)
        offset = end
        if offset - start >= PIECE_BYTES:
            yield data[start:offset]
            start = offset
    if start < offset:
        yield data[start:offset]


def _mergeable_type(field: FieldDescriptor | None) -> Descriptor | None:
    """Return the type of a singular message field, whose occurrences protobuf merges; None for other fields.

    The message of a oneof is not cut.
    """
    if field is None or field.type != FieldDescriptor.TYPE_MESSAGE:
        return None
    return None if field.is_repeated or field.containing_oneof is not None else field.message_type


def _read_field(data: memoryview, offset: int) -> tuple[int, int, memoryview | None]:
    """Return where the field at this offset ends, its number, and its payload if it is length-delimited.

    A group, or a field with an invalid wire type, is taken to extend to the end of the data, and is left to protobuf.

    Raises:
        DecodeError: the field is incomplete, or a varint has more than 10 bytes.
    """
    tag, start = _read_varint(data, offset)
    field_number, wire_type = tag >> 3, tag & 7
    if wire_type == _VARINT:
        return _read_varint(data, start)[1], field_number, None
    if wire_type == _LENGTH:
        length, start = _read_varint(data, start)
        end = start + length
        payload = data[start:end]
    else:
        end = start + _FIXED_NUM_BYTES[wire_type] if wire_type in _FIXED_NUM_BYTES else len(data)
        payload = None
    if end > len(data):
        raise DecodeError("the last field is incomplete")
    return end, field_number, payload


def _run_end(data: memoryview, offset: int, end: int) -> int:
    """Return where a run of fields with the same tag ends, at most one piece after `offset`.

    Args:
        data: the serialized message.
        offset: where the first field of the run starts.
        end: where it ends. This is also the end of the run if fields of this wire type have no fixed size.
    """
    if data[offset] & 7 not in _FIXED_NUM_BYTES:
        return end
    field_bytes = end - offset
    tag_bytes = field_bytes - _FIXED_NUM_BYTES[data[offset] & 7]
    num_fields = min(PIECE_BYTES, len(data) - offset) // field_bytes
    fields = np.frombuffer(data[offset : offset + num_fields * field_bytes], dtype=np.uint8).reshape(-1, field_bytes)
    tags = fields[:, :tag_bytes]
    differs = (tags != tags[:1]).any(axis=1)
    run_length = int(differs.argmax()) if differs.any() else max(1, num_fields)
    return offset + field_bytes * run_length


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if offset + index >= len(data):
            break
        byte = data[offset + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DecodeError("a varint is incomplete or longer than 10 bytes")
