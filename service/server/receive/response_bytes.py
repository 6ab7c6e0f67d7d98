"""Memory that a response needs, estimated before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.api.sampling import MAX_TOP_LOGPROBS

# Copies in the engine's result, the serialized message, and gRPC.
_NUM_COPIES = 3
_LOGIT_BYTES = 4
# Upper bound for a copy of a log probability with its token: 8 bytes in the engine, at most 13 in a message.
_LOGPROB_BYTES = 16

# By the name of a request's message: a function that returns the number of prompt tokens and the message with the field
# `prompt_logprobs`. Keys are names, because the gateway's messages are imported only where the gateway is enabled.
_PROMPT_READERS: dict[str, Callable[[Any], tuple[int, Any]]] = {
    "radixkv.v1.GenerateRequest": lambda request: (len(request.prefill.token_ids), request),
    "vllm.grpc.engine.GenerateRequest": lambda request: (len(request.tokenized.input_ids), request.sampling_params),
}


def unsent_bytes(num_tokens: int, num_logprobs: int) -> int:
    """Return the bytes that generated tokens take in all copies until they are sent.

    Args:
        num_tokens: number of generated tokens.
        num_logprobs: log probabilities per token.
    """
    return num_tokens * (1 + num_logprobs) * _LOGPROB_BYTES * _NUM_COPIES


def response_bytes(request: Any, vocab_size: int) -> int:
    """Return the bytes that requested logits or prompt log probabilities take in all copies; 0 without any.

    The engine may finish a thousand such requests before the first response was sent, so these bytes count as held from
    the start of the call. Generated tokens count when they are generated; see `TokenStream`.
    """
    num_bytes = vocab_size * _LOGIT_BYTES if getattr(request, "return_logits", False) else 0
    read_prompt = _PROMPT_READERS.get(request.DESCRIPTOR.full_name)
    if read_prompt is not None:
        num_tokens, options = read_prompt(request)
        if options.HasField("prompt_logprobs"):
            num_top_logprobs = max(0, min(options.prompt_logprobs, MAX_TOP_LOGPROBS))  # other numbers are refused later
            num_bytes += num_tokens * (1 + num_top_logprobs) * _LOGPROB_BYTES
    return num_bytes * _NUM_COPIES
