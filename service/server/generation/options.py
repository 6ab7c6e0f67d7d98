"""Reads the options of a generation from its message."""

from __future__ import annotations

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_ANSWERS,
    MAX_STOP_TOKEN_IDS,
    Sampling,
    random_seed,
)
from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.v1 import prefill_pb2


def read_sampling(request: prefill_pb2.GenerateRequest) -> Sampling:
    """Read the options of a generation.

    Raises:
        InvalidRequest: there are too many stop tokens, or the compression has no policy.
    """
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(request.stop_token_ids)}"
        )
    return Sampling(
        max_new_tokens=request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS,
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        seed=request.seed if request.HasField("seed") else random_seed(),
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        compression=read_compression(request),
    )


def read_compression(request: prefill_pb2.GenerateRequest) -> Compression | None:
    """Read what K/V a generation keeps; None for all.

    Raises:
        InvalidRequest: there is no policy, or one that is not known.
    """
    if not request.HasField("compression"):
        return None
    asked = request.compression
    policies = {prefill_pb2.CompressionPolicy.Value(policy.name): policy for policy in CompressionPolicy}
    if asked.policy not in policies:
        raise InvalidRequest(
            f"compression.policy: expected one of {', '.join(each.name for each in policies.values())}, got "
            f"{asked.policy}"
        )
    return Compression(
        policy=policies[asked.policy],
        max_tokens=asked.max_tokens,
        num_sinks=asked.num_sinks if asked.HasField("num_sinks") else None,
        window=asked.window if asked.HasField("window") else None,
    )


def read_grammar(request: prefill_pb2.GenerateRequest) -> GrammarText | None:
    """Read what the answers must follow; None for nothing."""
    field = request.WhichOneof("constraint")
    if field is None or (field == "json_object" and not request.json_object):
        return None
    return (
        GrammarText.of_json_object(field)
        if field == "json_object"
        else GrammarText(field, field, getattr(request, field))
    )


def read_num_answers(request: prefill_pb2.GenerateRequest) -> int:
    """Read how many answers a generation has.

    Raises:
        InvalidRequest: none, or too many.
    """
    if not request.HasField("n"):
        return 1
    if not 1 <= request.n <= MAX_ANSWERS:
        raise InvalidRequest(f"n: expected 1 to {MAX_ANSWERS}, got {request.n}")
    return request.n
