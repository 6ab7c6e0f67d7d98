"""Choices of the entries of a prompt that are kept: positions for each head of each layer, ascending."""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

_POOLED = 5  # neighbors that share their mass, as in the code that came with the paper of SnapKV


def first_and_last(num_tokens: int, num_sinks: int, num_entries: int) -> torch.Tensor:
    """Choose the first tokens and the last ones.

    Returns:
        int64 `[num_entries]`.
    """
    first = torch.arange(num_sinks)
    return torch.cat((first, torch.arange(num_tokens - (num_entries - num_sinks), num_tokens)))


def heaviest_and_last(mass: torch.Tensor, window: int, num_entries: int, *, is_pooled: bool) -> torch.Tensor:
    """Choose the last tokens, and of the others those with the largest mass, of equal ones the first.

    Args:
        mass: float32 `[num_layers, num_kv_heads, num_tokens]`.
        window: last tokens that are chosen in any case, below `num_entries`.
        num_entries: tokens to choose, below `num_tokens`.
        is_pooled: whether the mass of a token is the mean of its neighborhood, so that what belongs together stays.

    Returns:
        int64 `[num_layers, num_kv_heads, num_entries]`.
    """
    num_tokens = mass.shape[-1]
    before = mass[..., : num_tokens - window]
    if is_pooled:
        before = avg_pool1d(before, _POOLED, stride=1, padding=_POOLED // 2)
    order = before.sort(dim=-1, descending=True, stable=True).indices
    heaviest = order[..., : num_entries - window].sort(dim=-1).values
    last = torch.arange(num_tokens - window, num_tokens, device=mass.device)
    return torch.cat((heaviest, last.expand(*mass.shape[:2], window)), dim=-1)
