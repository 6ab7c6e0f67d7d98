"""The memory that the answer to a request will take, known before it is computed."""

from __future__ import annotations

from typing import Any

# The engine's numbers, the message's bytes, and gRPC's.
_NUM_COPIES = 3
_LOGIT_BYTES = 4


def answer_bytes(request: Any, vocab_size: int) -> int:
    """Return the bytes that the logits of an answer take, in all their copies; 0 if none are asked for.

    The engine may be done with a thousand such requests before the first answer has left. So they count as held from
    the start.
    """
    return vocab_size * _LOGIT_BYTES * _NUM_COPIES if getattr(request, "return_logits", False) else 0
