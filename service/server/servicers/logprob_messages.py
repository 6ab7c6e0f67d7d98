"""Adds log probabilities to the messages of a response stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter, num_logprobs, row_slices
from radixkv.service.token_ids import length_head
from radixkv.v1 import prefill_pb2

# A TokenLogprob in the field `top` on the wire. Protobuf accepts varints with more bytes than necessary, so with five
# bytes per token id, all entries have the same length.
_ID_BYTES = 5
_TOP = np.dtype([("head", "u1", (3,)), ("token_id", "u1", (_ID_BYTES,)), ("logprob_key", "u1"), ("logprob", "<f4")])
_TOP_HEAD = (0x12, _TOP.itemsize - 2, 0x08)  # the key of `top`, the length, the key of `token_id`
_LOGPROB_KEY, _OWN_LOGPROB_KEY = 0x15, 0x0D  # the keys of `logprob` in TokenLogprob and in TokenLogprobs


async def add_logprobs(
    writer: ResponseWriter,
    response: prefill_pb2.GenerateResponse,
    logprobs: Sequence[TokenLogprobs],
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> prefill_pb2.GenerateResponse | bytes:
    """Add log probabilities to a response.

    Args:
        writer: serializes large responses.
        response: the response, complete except for log probabilities.
        logprobs: log probabilities of its tokens.
        prompt_logprobs: log probabilities of the prompt, if they belong in this response.

    Returns:
        The response, as bytes if it is large.
    """
    rows_by_field = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    if sum(map(num_logprobs, rows_by_field.values())) > PIECE_LOGPROBS:
        return await writer.join(_pieces(response, rows_by_field))
    for name, rows in rows_by_field.items():
        _append_messages(getattr(response, name), rows)
    return response


def _pieces(
    response: prefill_pb2.GenerateResponse, rows_by_field: Mapping[str, Sequence[TokenLogprobs]]
) -> Iterator[bytes]:
    """Yield serialized messages whose concatenation is one message: protobuf concatenates repeated fields."""
    yield response.SerializeToString()
    for name, rows in rows_by_field.items():
        for row_slice in row_slices(rows):
            if isinstance(rows, LogprobTable):
                yield _serialize_rows(response.DESCRIPTOR.fields_by_name[name].number, rows.rows(row_slice))
                continue
            piece = prefill_pb2.GenerateResponse()
            _append_messages(getattr(piece, name), rows[row_slice])
            yield piece.SerializeToString()


def _append_messages(messages: Any, rows: Iterable[TokenLogprobs]) -> None:
    """Append a message for each row to a repeated field."""
    for row in rows:
        top = messages.add(logprob=row.logprob).top
        for token_id, logprob in row.top:
            top.add(token_id=token_id, logprob=logprob)


def _serialize_rows(field_number: int, rows: LogprobRows) -> bytes:
    """Serialize rows as a repeated field of TokenLogprobs, 20 times as fast as with a protobuf message per number."""
    num_rows, num_top = rows.token_ids.shape
    own = np.dtype([("key", "u1"), ("logprob", "<f4")])
    head = length_head(field_number, own.itemsize + num_top * _TOP.itemsize)
    serialized = np.empty(num_rows, [("head", "u1", (len(head),)), ("own", own), ("top", _TOP, (num_top,))])
    serialized["head"] = tuple(head)
    serialized["own"]["key"] = _OWN_LOGPROB_KEY
    serialized["own"]["logprob"] = rows.logprobs[:, 0]  # column 0 is the token itself, the others are the top tokens
    top = serialized["top"]  # [num_rows, num_top]
    top["head"], top["logprob_key"], top["logprob"] = _TOP_HEAD, _LOGPROB_KEY, rows.logprobs[:, 1:]
    for index in range(_ID_BYTES):
        continuation = 0x80 if index < _ID_BYTES - 1 else 0
        top["token_id"][..., index] = rows.token_ids >> np.uint32(7 * index) & 0x7F | continuation
    return serialized.tobytes()
