"""Reads requests of the gateway, whose messages have other defaults, and refuses fields that are not supported."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from radixkv.api.caller import Caller
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import MAX_ANSWERS, MAX_STOP_TOKEN_IDS, NUM_SEEDS, Sampling, random_seed
from radixkv.errors import InvalidRequest
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.servicers.messages import new_request_id, require_names
from radixkv.service.structured.grammar_text import GrammarText

# Fields that would change the completion, and that radixkv does not support.
_REFUSED_FIELDS = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
_REFUSED_LISTS = ("extra_mm_inputs",)
_REFUSED_SAMPLING_FIELDS = ("truncate_prompt_tokens", "structural_tag")


@dataclass(frozen=True, slots=True)
class GatewayGeneration:
    """A generation that the gateway requests.

    Attributes:
        params: the prompt and its options.
        sampling: the options of the first completion.
        num_completions: number of completions.
        stops: stop strings.
        grammar: constrains the completions; None without one.
        is_streamed: whether tokens are sent as they are generated.
    """

    params: PrefillParams
    sampling: Sampling
    num_completions: int
    stops: tuple[str, ...]
    grammar: GrammarText | None
    is_streamed: bool


def read_generation(
    request: vllm_engine_pb2.GenerateRequest, limits: Limits, tenant: str, remaining_s: float | None, traceparent: str
) -> GatewayGeneration:
    """Read a generation request.

    Args:
        request: the message.
        limits: the engine's limits, which bound a completion without a maximum length.
        tenant: the tenant that owns the gateway's data.
        remaining_s: seconds until the gateway's deadline; None without one.
        traceparent: the gateway's span; empty without one.

    Raises:
        InvalidRequest: a field is out of range or not supported. The message names it.
    """
    require_names(request_id=request.request_id)
    _require_supported(request)
    options = request.sampling_params
    tokens = np.asarray(request.tokenized.input_ids, dtype="<u4").tobytes()
    params = PrefillParams(
        tokens=tokens,
        caller=Caller(tenant),
        request_id=request.request_id or new_request_id(),
        traceparent=traceparent,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )
    if options.n > MAX_ANSWERS:
        raise InvalidRequest(f"n: expected at most {MAX_ANSWERS}, got {options.n}")
    default_max_new_tokens = max(1, limits.max_new_tokens(params.num_tokens, tenant))
    sampling = _read_sampling(options, default_max_new_tokens)
    return GatewayGeneration(
        params, sampling, options.n or 1, tuple(options.stop), _read_grammar(options), request.stream
    )


def _read_sampling(options: vllm_engine_pb2.SamplingParams, default_max_new_tokens: int) -> Sampling:
    if options.HasField("max_tokens") and options.max_tokens == 0:
        raise InvalidRequest("max_tokens: expected at least 1, got 0")
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(options.stop_token_ids)}"
        )
    return Sampling(
        max_new_tokens=options.max_tokens if options.HasField("max_tokens") else default_max_new_tokens,
        temperature=options.temperature if options.HasField("temperature") else 1.0,
        top_p=options.top_p or 1.0,
        seed=options.seed % NUM_SEEDS if options.HasField("seed") else random_seed(),
        stop_token_ids=frozenset(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty or 1.0,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        min_tokens=options.min_tokens,
        logprobs=options.logprobs if options.HasField("logprobs") else None,
        prompt_logprobs=options.prompt_logprobs if options.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(options.logit_bias.items())),
    )


def _read_grammar(options: vllm_engine_pb2.SamplingParams) -> GrammarText | None:
    field = options.WhichOneof("constraint")
    if field == "choice":
        return GrammarText.of_choices(field, options.choice.choices)
    if field == "json_object":
        return GrammarText.of_json_object(field) if options.json_object else None
    return None if field is None else GrammarText(field, field, getattr(options, field))


def _require_supported(request: vllm_engine_pb2.GenerateRequest) -> None:
    """Refuse fields that radixkv would have to ignore."""
    options = request.sampling_params
    unsupported = [name for name in _REFUSED_FIELDS if request.HasField(name)]
    unsupported += [name for name in _REFUSED_LISTS if getattr(request, name)]
    unsupported += [name for name in _REFUSED_SAMPLING_FIELDS if options.HasField(name)]
    if unsupported:
        raise InvalidRequest(f"{unsupported[0]}: radixkv does not support this field; leave it out")
    if request.WhichOneof("input") == "text":
        raise InvalidRequest("text: expected token ids in tokenized.input_ids, got text")
    if request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank: expected 0, got {request.data_parallel_rank}")
