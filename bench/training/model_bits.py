"""Bits that a causal language model needs for a text."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

WINDOW_TOKENS = 2048


@torch.inference_mode()
def model_bits(module: PreTrainedModel, ids: torch.Tensor, window_tokens: int = WINDOW_TOKENS) -> float:
    """Return the bits of a text, without its first token.

    Each token is predicted once, from at least half a window of tokens before it, or from all of them if there are
    fewer.

    Args:
        module: the model, in evaluation mode.
        ids: the text, int64 `[num_tokens]`.
        window_tokens: tokens that are computed at once, an even number.
    """
    half = window_tokens // 2
    total = 0.0
    for start in range(0, max(1, ids.numel() - 1 - half), half):
        window = ids[start : start + window_tokens + 1]
        logits = module(window[None, :-1], use_cache=False).logits[0].float()
        num_context = half if start else 0
        total += cross_entropy(logits[num_context:], window[num_context + 1 :], reduction="sum").item()
    return total / math.log(2)
