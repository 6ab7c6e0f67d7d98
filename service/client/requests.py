"""The arguments of the clients' calls as protobuf messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from radixkv.api.retention import MAX_TTL_S, Retention
from radixkv.service.token_ids import pack_token_ids, write_token_ids
from radixkv.v1.cache_pb2 import PurgeRequest, RetainRequest
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest, ProbeRequest
from radixkv.v1.prefill_pb2 import Retention as RetentionMessage

_Message = TypeVar("_Message", bound=Message)

# What fields of requests may hold, for messages.
_EXPECTED = {
    FieldDescriptor.TYPE_STRING: "text in UTF-8",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_UINT32: "whole numbers from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_FIXED32: "whole numbers from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 2**64 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
}


def prefill_request(
    token_ids: npt.ArrayLike,
    *,
    tenant: str,
    adapter: str,
    salt: str,
    request_id: str,
    read_cache: bool,
    write_cache: bool,
    retention: Retention | None,
    priority: int | None,
    top_logprobs: int = 0,
    return_logits: bool = False,
    hold_lease: bool = False,
) -> PrefillRequest:
    """See `Client.prefill`."""
    request = _message(
        PrefillRequest,
        tenant=tenant,
        adapter=adapter,
        salt=salt,
        request_id=request_id,
        read_cache=read_cache,
        write_cache=write_cache,
        retention=_retention_message(retention),
        priority=priority,
        top_logprobs=top_logprobs,
        return_logits=return_logits,
        hold_lease=hold_lease,
    )
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def generate_request(
    prefill: PrefillRequest,
    *,
    max_new_tokens: int | None,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    stop_token_ids: Sequence[int],
    ignore_eos: bool,
) -> GenerateRequest:
    """See `Client.generate`."""
    return _message(
        GenerateRequest,
        prefill=prefill,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )


def probe_request(token_ids: npt.ArrayLike, *, tenant: str, adapter: str, salt: str) -> ProbeRequest:
    """See `Client.probe`."""
    request = _message(ProbeRequest, tenant=tenant, adapter=adapter, salt=salt)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def retain_request(
    token_ids: npt.ArrayLike, retention: Retention, *, tenant: str, adapter: str, salt: str
) -> RetainRequest:
    """See `Client.retain`."""
    retained = _retention_message(retention)
    request = _message(RetainRequest, tenant=tenant, adapter=adapter, salt=salt, retention=retained)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def purge_request(tenant: str | None, adapter: str | None, salt: str | None, *, everything: bool) -> PurgeRequest:
    """See `Client.purge`."""
    is_named = (tenant, adapter, salt) != (None, None, None)
    if is_named is bool(everything):
        got = "both" if is_named else "none"
        raise ValueError(f"purge: expected either a tenant, an adapter or a salt, or `everything`, got {got}")
    return _message(PurgeRequest, tenant=tenant, adapter=adapter, salt=salt)


def _message(kind: type[_Message], **fields: Any) -> _Message:
    """A message of these fields, None for those that are left out.

    Raises:
        TypeError, ValueError: a field has another type, or does not fit; the message names it.
    """
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                expected = _EXPECTED[kind.DESCRIPTOR.fields_by_name[name].type]
                refusal = TypeError if isinstance(error, TypeError) else ValueError
                raise refusal(f"{name}: expected {expected}, got {reprlib.repr(value)}") from error
        raise


def _retention_message(retention: Retention | None) -> RetentionMessage | None:
    if retention is None:
        return None
    if not isinstance(retention, Retention):
        raise TypeError(f"retention: expected a Retention, got {reprlib.repr(retention)}")
    for name in ("priority", "start", "end"):
        value = getattr(retention, name)
        if value is not None and not (isinstance(value, int) and 0 <= value < 2**32):
            raise ValueError(f"retention.{name}: expected a whole number from 0, got {value}")
    ttl_s = retention.ttl_s
    if ttl_s is not None and not (isinstance(ttl_s, int | float) and 0 < ttl_s <= MAX_TTL_S):
        raise ValueError(f"retention.ttl_s: expected more than 0 and at most {MAX_TTL_S:.0f} seconds, got {ttl_s!r}")
    seconds, nanos = divmod(round((ttl_s or 0) * 1e9), 1_000_000_000)
    return RetentionMessage(
        priority=retention.priority,
        ttl=None if ttl_s is None else Duration(seconds=seconds, nanos=nanos),
        start_token=retention.start,
        end_token=retention.end,
    )
