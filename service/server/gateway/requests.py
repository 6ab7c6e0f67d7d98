"""Reads the gateway's requests. Its messages have other defaults than ours; what radixkv does not do is refused."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import numpy as np

from radixkv.api.caller import Caller
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import MAX_ANSWERS, MAX_STOP_TOKEN_IDS, Sampling, random_seed
from radixkv.errors import InvalidRequest
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.messages import require_names
from radixkv.service.structured.grammar_text import GrammarText

_NUM_SEEDS = 2**64

# Fields that would change the answer, and that radixkv can't follow.
_REFUSED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
_REFUSED_LISTS = ("extra_mm_inputs",)
_REFUSED_OF_SAMPLING = ("truncate_prompt_tokens", "structural_tag")


@dataclass(frozen=True, slots=True)
class Asked:
    """A generation that the gateway asks for.

    Attributes:
        params: the prompt.
        sampling: the options of its first answer.
        num_answers: how often it is answered.
        stops: strings that end an answer.
        grammar: what each answer follows; None for nothing.
        is_streamed: whether tokens are told as they come.
    """

    params: PrefillParams
    sampling: Sampling
    num_answers: int
    stops: tuple[str, ...]
    grammar: GrammarText | None
    is_streamed: bool


def read_generation(
    request: vllm_engine_pb2.GenerateRequest, limits: Limits, tenant: str, remaining_s: float | None, traceparent: str
) -> Asked:
    """Read a request for tokens.

    Args:
        request: the message.
        limits: an answer without a length is as long as they allow.
        tenant: the owner of the gateway's data.
        remaining_s: seconds until the gateway's deadline; None without one.
        traceparent: the gateway's span; empty without one.

    Raises:
        InvalidRequest: a field can't be read, or asks for what radixkv does not do. The message names it.
    """
    require_names(request_id=request.request_id)
    _require_followed(request)
    asked = request.sampling_params
    tokens = np.asarray(request.tokenized.input_ids, dtype="<u4").tobytes()
    params = PrefillParams(
        tokens=tokens,
        caller=Caller(tenant),
        request_id=request.request_id or secrets.token_hex(16),
        traceparent=traceparent,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )
    if asked.n > MAX_ANSWERS:
        raise InvalidRequest(f"n: expected at most {MAX_ANSWERS}, got {asked.n}")
    most_new_tokens = max(1, limits.most_new_tokens(params.num_tokens, tenant))
    sampling = _read_sampling(asked, most_new_tokens)
    return Asked(params, sampling, asked.n or 1, tuple(asked.stop), _read_grammar(asked), request.stream)


def _read_sampling(asked: vllm_engine_pb2.SamplingParams, most_new_tokens: int) -> Sampling:
    if asked.HasField("max_tokens") and asked.max_tokens == 0:
        raise InvalidRequest("max_tokens: expected at least 1, got 0")
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(asked.stop_token_ids)}"
        )
    return Sampling(
        max_new_tokens=asked.max_tokens if asked.HasField("max_tokens") else most_new_tokens,
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_p=asked.top_p or 1.0,
        seed=asked.seed % _NUM_SEEDS if asked.HasField("seed") else random_seed(),
        stop_token_ids=frozenset(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty or 1.0,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        min_tokens=asked.min_tokens,
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
    )


def _read_grammar(asked: vllm_engine_pb2.SamplingParams) -> GrammarText | None:
    field = asked.WhichOneof("constraint")
    if field == "choice":
        return GrammarText.of_choices(field, asked.choice.choices)
    if field == "json_object":
        return GrammarText.of_json_object(field) if asked.json_object else None
    return None if field is None else GrammarText(field, field, getattr(asked, field))


def _require_followed(request: vllm_engine_pb2.GenerateRequest) -> None:
    """Refuse fields that radixkv would have to ignore."""
    asked = request.sampling_params
    present = [name for name in _REFUSED if request.HasField(name)]
    present += [name for name in _REFUSED_LISTS if getattr(request, name)]
    present += [name for name in _REFUSED_OF_SAMPLING if asked.HasField(name)]
    if present:
        raise InvalidRequest(f"{present[0]}: expected none, because radixkv can't follow it, got one")
    if request.WhichOneof("input") == "text":
        raise InvalidRequest("text: expected token ids in tokenized.input_ids, got text")
    if request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank: expected 0, got {request.data_parallel_rank}")
