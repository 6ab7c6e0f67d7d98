"""The memory that the answer to a request will take, known before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.api.sampling import MAX_TOP_LOGPROBS

# The engine's numbers, the message's bytes, and gRPC's.
_NUM_COPIES = 3
_LOGIT_BYTES = 4
# A log probability with its token: 8 bytes in the engine, 13 at most in a message.
_LOGPROB_BYTES = 16

# By message: the tokens of the prompt, and the options with `prompt_logprobs`. The gateway's messages are not imported.
_PROMPTS: dict[str, Callable[[Any], tuple[int, Any]]] = {
    "radixkv.v1.GenerateRequest": lambda request: (len(request.prefill.token_ids), request),
    "vllm.grpc.engine.GenerateRequest": lambda request: (len(request.tokenized.input_ids), request.sampling_params),
}


def unread_bytes(num_tokens: int, num_logprobs: int) -> int:
    """Return the bytes that generated tokens take in all copies until they are sent, each as much as one more number.

    Args:
        num_tokens: that were generated.
        num_logprobs: log probabilities of each.
    """
    return num_tokens * (1 + num_logprobs) * _LOGPROB_BYTES * _NUM_COPIES


def answer_bytes(request: Any, vocab_size: int) -> int:
    """Return the bytes that logits, or log probabilities of a prompt, take in all copies; 0 if none are asked for.

    The engine may be done with a thousand such requests before the first answer has left. So they count as held from
    the start. Generated tokens count when they come; see `TokenStream`.
    """
    num_bytes = vocab_size * _LOGIT_BYTES if getattr(request, "return_logits", False) else 0
    if (prompt := _PROMPTS.get(request.DESCRIPTOR.full_name)) is not None:
        num_tokens, options = prompt(request)
        if options.HasField("prompt_logprobs"):
            num_top = max(0, min(options.prompt_logprobs, MAX_TOP_LOGPROBS))  # others are refused
            num_bytes += num_tokens * (1 + num_top) * _LOGPROB_BYTES
    return num_bytes * _NUM_COPIES
