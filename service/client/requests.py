"""Arguments of the clients' calls, and the protobuf messages that they make."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import MAX_TTL_S, Retention
from radixkv.service.token_ids import TokenIds, pack_token_ids, write_token_ids
from radixkv.v1.cache_pb2 import ListSegmentsRequest, PurgeRequest, RetainRequest
from radixkv.v1.prefill_pb2 import Compression as CompressionMessage
from radixkv.v1.prefill_pb2 import GenerateRequest, KVSource, PrefillRequest, PrefillResponse, ProbeRequest
from radixkv.v1.prefill_pb2 import Retention as RetentionMessage

_Message = TypeVar("_Message", bound=Message)

# Values that a field of each type may hold, for messages.
_EXPECTED = {
    FieldDescriptor.TYPE_STRING: "text in UTF-8",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_UINT32: "whole numbers from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_FIXED32: "whole numbers from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 2**64 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_MESSAGE: "a message of its type",
}


class PromptOptions(TypedDict, total=False):
    """Options of a prompt; `Client.prefill` and `Client.generate` take them as keywords. All may be left out.

    Attributes:
        tenant, adapter, salt: identity, empty by default; only requests with equal ones share cached tokens.
        request_id: echoed in the answer; made by the server when empty.
        read_cache: reuse cached tokens; default true.
        write_cache: publish the computed tokens for later requests; default true.
        retention: keep the prompt longer than others, or less long; the answer's `retained` says what was granted.
        urgency: 0 to 100, default 50; orders the tenant's own requests. A point is worth a second of waiting: a request
            of 60 goes before those of 50 that arrived up to 10 s earlier. The .proto calls it `priority`.
    """

    tenant: str
    adapter: str
    salt: str
    request_id: str
    read_cache: bool
    write_cache: bool
    retention: Retention | None
    urgency: int | None


class PrefillOptions(PromptOptions, total=False):
    """Options of `Client.prefill`.

    Attributes:
        top_logprobs: number of most likely next tokens to report, at most 100; default 0.
        return_logits: return the whole row of logits, for `logits_of`; default false.
        hold_lease: keep the prompt's blocks alive until `Client.release`; default false.
    """

    top_logprobs: int
    return_logits: bool
    hold_lease: bool


class GenerateOptions(PromptOptions, total=False):
    """Options of `Client.generate`.

    Attributes:
        max_new_tokens: at least 1; default 16.
        temperature: divides the logits; 0, the default, takes the most likely token.
        top_p: draw from the fewest tokens that together have this probability; default 1, all of them.
        seed: the same seed draws the same tokens for the same prompt; default a random one.
        stop_token_ids: each of them ends the generation, as its last token; at most 1,024, default none.
        stop: strings that end the generation; the last token is the one that completes one of them. At most 16, each of
            1 to 256 characters. The model needs a tokenizer. Default none.
        ignore_eos: continue after the model's own end-of-sequence tokens; default false.
        top_k: draw from this number of the most likely tokens; default 0, all of them.
        min_p: draw from tokens with at least this share of the most likely one's probability, 0 to 1; default 0.
        repetition_penalty: divides positive logits of tokens in the prompt or the answer, and multiplies negative ones;
            1e-6 to 1e6, default 1.
        presence_penalty: subtracted from the logits of tokens in the answer, -2 to 2; default 0.
        frequency_penalty: the same, once for each time that the token is in the answer, -2 to 2; default 0.
        min_tokens: stop tokens do not come before these many others; default 0.
        logit_bias: added to the logits of these tokens, at most 1,024, by token id; -100 to 100, default none.
        logprobs: tell the log probability of each generated token, and those of this number of most likely ones, 0 to
            100; default none.
        prompt_logprobs: the same for each token of the prompt but the first, with the first answer; the prompt is
            computed anew. Default none.
        n: answers to the prompt, 1 to 64, told apart by `index`; default 1.
        json_schema: a JSON schema that the text of each answer follows. One of this and the next three may be given.
        regex: a regular expression for the whole text of each answer.
        grammar: a grammar for it, in the syntax of Lark or of llama.cpp.
        json_object: whether each answer is a JSON object.
        kv_source: a held lease of another server, whose K/V of the prompt is fetched; default none.
        compression: keep only some K/V after the prompt, for other answers; default none, which keeps all.
    """

    max_new_tokens: int | None
    temperature: float
    top_p: float | None
    seed: int | None
    stop_token_ids: Sequence[int]
    stop: Sequence[str]
    ignore_eos: bool
    top_k: int
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    json_schema: str | None
    regex: str | None
    grammar: str | None
    json_object: bool | None
    kv_source: KVSource | None
    compression: Compression | None


_CONSTRAINTS = ("json_schema", "regex", "grammar", "json_object")
WIRE_NAMES = {"urgency": "priority"}  # options whose field has another name in the .proto


def prefill_request(token_ids: TokenIds, options: PrefillOptions) -> PrefillRequest:
    """Make the message of `Client.prefill`, which names what it raises."""
    _require_known("prefill", options, PrefillOptions.__optional_keys__)
    return _prompt(token_ids, dict(options))


def generate_request(token_ids: TokenIds, options: GenerateOptions) -> GenerateRequest:
    """Make the message of `Client.generate`, which names what it raises."""
    _require_known("generate", options, GenerateOptions.__optional_keys__)
    if isinstance(options.get("stop"), str):  # which would be taken for its letters
        raise TypeError(f"stop: expected a sequence of texts, got {reprlib.repr(options['stop'])}")
    constraints = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(constraints) > 1:  # of which the last one would be taken
        raise ValueError(f"{constraints[1]}: expected none beside {constraints[0]}, got one")
    of_prompt = {name: value for name, value in options.items() if name in PromptOptions.__optional_keys__}
    others = {name: value for name, value in options.items() if name not in of_prompt}
    if "compression" in others:
        others["compression"] = _compression_message(others["compression"])
    return _message(GenerateRequest, prefill=_prompt(token_ids, of_prompt), **others)


def probe_request(token_ids: TokenIds, *, tenant: str, adapter: str, salt: str) -> ProbeRequest:
    """Make the message of `Client.probe`, which names what it raises."""
    request = _message(ProbeRequest, tenant=tenant, adapter=adapter, salt=salt)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def retain_request(token_ids: TokenIds, retention: Retention, *, tenant: str, adapter: str, salt: str) -> RetainRequest:
    """Make the message of `Client.retain`, which names what it raises."""
    retained = _retention_message(retention)
    request = _message(RetainRequest, tenant=tenant, adapter=adapter, salt=salt, retention=retained)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def purge_request(tenant: str | None, adapter: str | None, salt: str | None, *, everything: bool) -> PurgeRequest:
    """Make the message of `Client.purge`, which names what it raises."""
    is_named = (tenant, adapter, salt) != (None, None, None)
    if is_named is bool(everything):
        got = "both" if is_named else "none"
        raise ValueError(f"purge: expected either a tenant, an adapter or a salt, or `everything`, got {got}")
    return _message(PurgeRequest, tenant=tenant, adapter=adapter, salt=salt)


def segments_request(
    tenant: str | None, page_size: int | None, page_token: str, store: str, *, hottest_first: bool
) -> ListSegmentsRequest:
    """Make the message of `Client.segments`, which names what it raises."""
    return _message(
        ListSegmentsRequest,
        tenant=tenant,
        page_size=page_size,
        page_token=page_token,
        store=store,
        hottest_first=hottest_first,
    )


def logits_of(response: PrefillResponse) -> npt.NDArray[np.float32]:
    """Read the logits of an answer to `prefill(return_logits=True)`.

    Returns:
        float32 `[vocab_size]`, read-only, a view of the answer's bytes; empty if logits were not asked for.
    """
    return np.frombuffer(response.logits, dtype="<f4")


def _prompt(token_ids: TokenIds, options: dict[str, Any]) -> PrefillRequest:
    if "retention" in options:
        options["retention"] = _retention_message(options["retention"])
    request = _message(PrefillRequest, **options)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def _require_known(call: str, options: Mapping[str, object], known: Set[str]) -> None:
    for name in options:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


def _message(kind: type[_Message], **fields: Any) -> _Message:
    """Make a message of these fields; None leaves a field out.

    Raises:
        TypeError, ValueError: a field has another type, or does not fit; the message names it.
    """
    try:
        return kind(**{WIRE_NAMES.get(name, name): value for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        for name, value in fields.items():
            field = WIRE_NAMES.get(name, name)
            try:
                kind(**{field: value})
            except (TypeError, ValueError):
                expected = _EXPECTED[kind.DESCRIPTOR.fields_by_name[field].type]
                refusal = TypeError if isinstance(error, TypeError) else ValueError
                raise refusal(f"{name}: expected {expected}, got {reprlib.repr(value)}") from error
        raise


def _compression_message(compression: object) -> CompressionMessage | None:
    if compression is None:
        return None
    if not isinstance(compression, Compression):
        raise TypeError(f"compression: expected a Compression, got {reprlib.repr(compression)}")
    for name in ("max_tokens", "num_sinks", "window"):
        value = getattr(compression, name)
        if value is not None and not (isinstance(value, int) and 0 <= value < 2**32):
            raise ValueError(f"compression.{name}: expected a whole number from 0, got {reprlib.repr(value)}")
    return CompressionMessage(
        policy=CompressionPolicy(compression.policy).name,
        max_tokens=compression.max_tokens,
        num_sinks=compression.num_sinks,
        window=compression.window,
    )


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
