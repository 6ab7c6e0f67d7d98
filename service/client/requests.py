"""The options of prompts, and the request messages that the clients build from their arguments."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from radixkv.api.awaits import Awaits
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import MAX_TTL_S, Retention
from radixkv.service.token_ids import TokenIds, Tokens, pack_token_ids, write_token_ids
from radixkv.v1.cache_pb2 import ExplainRequest, HintRequest, PurgeRequest, RetainRequest
from radixkv.v1.explain_pb2 import PromptSegment
from radixkv.v1.hints_pb2 import KvHintsEnvelope
from radixkv.v1.prefill_pb2 import Compression as CompressionMessage
from radixkv.v1.prefill_pb2 import GenerateRequest, KVSource, PrefillRequest, PrefillResponse
from radixkv.v1.prefill_pb2 import Retention as RetentionMessage

_Message = TypeVar("_Message", bound=Message)

# What a field of each type may hold, for error messages.
_EXPECTED = {
    FieldDescriptor.TYPE_STRING: "text in UTF-8",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_FIXED32: "a whole number from 0 to 2**32 - 1",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 2**64 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_ENUM: "a member of its enum",
    FieldDescriptor.TYPE_MESSAGE: "a message of its type",
}


class PromptOptions(TypedDict, total=False):
    """Keyword arguments of `Client.prefill`, `Client.generate` and `Client.chat`. All are optional.

    Attributes:
        tenant, adapter, salt: names of the namespace, empty by default. Apart from public prefixes, requests share
            cached tokens only within one namespace. Names of the same adapter lead to the same namespace.
        request_id: returned in the response; the server generates one if it is empty.
        read_cache: reuse cached tokens; default true.
        write_cache: publish the computed tokens for later requests; default true.
        retention: keep the prompt in the cache for a longer or a shorter time than others; `retained` of the response
            says what was granted.
        urgency: scheduling priority among the tenant's own requests, 0 to 100, default 50. One point counts as one
            second of waiting: a request of 60 runs before requests of 50 that arrived up to 10 s earlier. The .proto
            calls it `priority`.
        session_id: the session (the conversation) of the request; default none.
        awaits: what the session waits for when the request has ended, if you know it. By default `Awaits.UNKNOWN`: the
            server infers it from the completion.
        kv_hints: a `KvHintsEnvelope` as a dict, applied when the request has ended; `hints` of the response has the
            outcomes. Default none.
        explain: return in `explanation` where the prompt diverges from what is cached, as `Client.explain` does. Of a
            generation, the first response has the explanation. Default false.
        omit_cached_text: leave tokens and text of the cached branch out of the explanation. Default false.
    """

    tenant: str
    adapter: str
    salt: str
    request_id: str
    read_cache: bool
    write_cache: bool
    retention: Retention | None
    urgency: int | None
    session_id: str
    awaits: Awaits
    kv_hints: Mapping[str, Any] | None
    explain: bool
    omit_cached_text: bool


class PrefillOptions(PromptOptions, total=False):
    """Options of `Client.prefill`.

    Attributes:
        top_logprobs: number of most likely next tokens to return, at most 100; default 0.
        return_logits: return the logits of the next token, for `logits_of`; default false.
        hold_lease: pin the prompt's blocks until `Client.release`, or until the lease expires; default false.
        return_block_table: return the physical ids of a held lease's blocks, for which the server requires the role
            admin; default false.
    """

    top_logprobs: int
    return_logits: bool
    hold_lease: bool
    return_block_table: bool


class GenerateOptions(PromptOptions, total=False):
    """Options of `Client.generate` and `Client.chat`.

    Attributes:
        max_new_tokens: maximum number of tokens to generate, at least 1; default 16.
        temperature: sampling temperature; 0, the default, is greedy decoding.
        top_p: nucleus sampling: sample from the smallest set of tokens whose cumulative probability reaches it;
            default 1, all tokens.
        seed: seed of sampling, which makes the completion of a prompt reproducible; default a random one.
        stop_token_ids: token ids that end the completion and are its last token; at most 1,024, default none.
        stop: strings that end the completion; its last token is the one that completes a string. At most 16 of 1 to 256
            characters. The model needs a tokenizer. Default none.
        ignore_eos: continue after the model's end-of-sequence tokens; default false.
        top_k: sample from this number of most likely tokens, and from those that are as likely as the last of them;
            default 0, all tokens.
        min_p: sample from tokens whose probability is at least this fraction of the most likely token's, 0 to 1;
            default 0.
        repetition_penalty: divides positive logits of tokens in the prompt or the completion, and multiplies negative
            ones; 1e-6 to 1e6, default 1.
        presence_penalty: subtracted from the logits of tokens in the completion, -2 to 2; default 0.
        frequency_penalty: subtracted from the logits of tokens in the completion once per occurrence, -2 to 2;
            default 0.
        min_tokens: number of tokens before which no stop token or end-of-sequence token is generated, and no stop
            string ends the completion; default 0.
        logit_bias: added to the logits of these token ids, at most 1,024 of them; -100 to 100, default none.
        logprobs: return the log probability of each generated token and of this number of most likely tokens, 0 to 100;
            default none.
        prompt_logprobs: like `logprobs`, but for each prompt token except the first; in the first response. The whole
            prompt is computed, even if it is cached. Default none.
        n: number of completions of the prompt, 1 to 64, each with its own `index`; default 1.
        json_schema: JSON schema that each completion follows. At most one of `json_schema`, `regex`, `grammar` and
            `json_object` may be given.
        regex: regular expression that the whole text of each completion matches.
        grammar: grammar of each completion, in the syntax of Lark or llama.cpp.
        json_object: whether each completion is a JSON object.
        kv_source: a held lease on another server, from which the K/V of the prompt is fetched; default none.
        compression: keep only some K/V entries after the prompt, which changes the completion; default none.
        write_generated: publish the generated tokens for later requests; default true.
        tool_call_begin: text with which a tool call begins, such as `<tool_call>`, so that the cache knows whether the
            session waits for a tool; default none.
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
    write_generated: bool | None
    tool_call_begin: str


_CONSTRAINTS = ("json_schema", "regex", "grammar", "json_object")
WIRE_NAMES = {"urgency": "priority"}  # options that have another name in the .proto


def make_request(kind: type[_Message], **fields: Any) -> _Message:
    """Return a message with these fields; a field of None is left out.

    Raises:
        TypeError, ValueError: a value has the wrong type or range; the error names its field.
    """
    try:
        return kind(**{WIRE_NAMES.get(name, name): value for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        for name, value in fields.items():
            field = WIRE_NAMES.get(name, name)
            try:
                kind(**{field: value})
            except (TypeError, ValueError):
                expected = _expected_of(kind.DESCRIPTOR.fields_by_name[field])
                error_type = TypeError if isinstance(error, TypeError) else ValueError
                raise error_type(f"{name}: expected {expected}, got {reprlib.repr(value)}") from error
        raise


def _expected_of(field: Any) -> str:  # a FieldDescriptor of either protobuf implementation
    """Return what a field may hold, for error messages."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "a mapping with keys and values of its types"
    expected = _EXPECTED.get(field.type, "another value")
    return f"a sequence of which each item is {expected}" if field.is_repeated else expected


def prompt_request(kind: type[Tokens], token_ids: TokenIds, **fields: Any) -> Tokens:
    """Return a message with a prompt and these fields; raises what `make_request` and `pack_token_ids` do."""
    request = make_request(kind, **fields)
    write_token_ids(request, pack_token_ids(token_ids))
    return request


def prefill_request(token_ids: TokenIds, options: PrefillOptions) -> PrefillRequest:
    """Return the request of `Client.prefill`; raises the errors that it documents."""
    _require_known_options("prefill", options, PrefillOptions.__optional_keys__)
    return _prefill_message(token_ids, dict(options))


def generate_request(token_ids: TokenIds, options: GenerateOptions) -> GenerateRequest:
    """Return the request of `Client.generate`; raises the errors that it documents."""
    _require_known_options("generate", options, GenerateOptions.__optional_keys__)
    if isinstance(options.get("stop"), str):  # protobuf would take each letter for a string
        raise TypeError(f"stop: expected a sequence of strings, got {reprlib.repr(options['stop'])}")
    constraints = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(constraints) > 1:  # protobuf would keep the last one
        raise ValueError(f"{constraints[1]}: can't be combined with {constraints[0]}")
    prompt_options = {name: value for name, value in options.items() if name in PromptOptions.__optional_keys__}
    other_options = {name: value for name, value in options.items() if name not in prompt_options}
    if "compression" in other_options:
        other_options["compression"] = _compression_message(other_options["compression"])
    return make_request(GenerateRequest, prefill=_prefill_message(token_ids, prompt_options), **other_options)


def retain_request(token_ids: TokenIds, retention: Retention, *, tenant: str, adapter: str, salt: str) -> RetainRequest:
    """Return the request of `Client.retain`; raises the errors that it documents."""
    return prompt_request(
        RetainRequest,
        token_ids,
        tenant=tenant,
        adapter=adapter,
        salt=salt,
        retention=_retention_message(retention),
    )


def explain_request(
    token_ids: TokenIds,
    segments: Sequence[tuple[str, int]],
    *,
    tenant: str,
    adapter: str,
    salt: str,
    omit_cached_text: bool,
) -> ExplainRequest:
    """Return the request of `Client.explain`; raises the errors that it documents."""
    return prompt_request(
        ExplainRequest,
        token_ids,
        tenant=tenant,
        adapter=adapter,
        salt=salt,
        segments=[make_request(PromptSegment, name=name, end_token=end) for name, end in segments],
        omit_cached_text=omit_cached_text,
    )


def purge_request(tenant: str | None, adapter: str | None, salt: str | None, *, everything: bool) -> PurgeRequest:
    """Return the request of `Client.purge`; raises the errors that it documents."""
    is_named = (tenant, adapter, salt) != (None, None, None)
    if is_named is bool(everything):
        got = "both" if is_named else "none"
        raise ValueError(f"purge: expected either a tenant, an adapter or a salt, or `everything`, got {got}")
    return make_request(PurgeRequest, tenant=tenant, adapter=adapter, salt=salt)


def logits_of(response: PrefillResponse) -> npt.NDArray[np.float32]:
    """Return the logits of a response to `prefill(return_logits=True)`.

    Returns:
        float32 `[vocab_size]`, a read-only view of the response's bytes; empty if logits were not requested.
    """
    return np.frombuffer(response.logits, dtype="<f4")


def _prefill_message(token_ids: TokenIds, options: dict[str, Any]) -> PrefillRequest:
    if "retention" in options:
        options["retention"] = _retention_message(options["retention"])
    if "kv_hints" in options:
        options["kv_hints"] = _hints_message(options["kv_hints"])
    return prompt_request(PrefillRequest, token_ids, **options)


def _require_known_options(call: str, options: Mapping[str, object], known_names: Set[str]) -> None:
    for name in options:
        if name not in known_names:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


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


def hint_request(
    actions: Sequence[Mapping[str, Any]], token_ids: TokenIds | None, *, tenant: str, adapter: str, salt: str
) -> HintRequest:
    """Return the request of `Client.hint`; raises the errors that it documents."""
    versioned_actions = [{"action_version": "1.0", **action} for action in actions]
    hints = _hints_message({"protocol_version": "1.0", "actions": versioned_actions})
    fields = {"tenant": tenant, "adapter": adapter, "salt": salt, "kv_hints": hints}
    if token_ids is None:
        return make_request(HintRequest, **fields)
    return prompt_request(HintRequest, token_ids, **fields)


def _hints_message(hints: Mapping[str, Any] | None) -> KvHintsEnvelope | None:
    if hints is None:
        return None
    try:
        return ParseDict(dict(hints), KvHintsEnvelope())
    except (ParseError, TypeError, ValueError) as error:
        raise ValueError(f"kv_hints: expected the fields of a KvHintsEnvelope, got: {error}") from error


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
        renew=retention.renew,
    )
