"""Moves single K/V entries in the pool. An entry is K and V of one token in one head of one layer."""

from __future__ import annotations

import torch

from radixkv.kernels.kv_pool import KVPool


def copy_entries(pool: KVPool, chosen: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy chosen entries into the first slots of other blocks, as they are stored, in place.

    Args:
        pool: the K/V.
        chosen: int64 `[num_layers, num_kv_heads, num_entries]`, the places of entries in `sources`.
        sources: int64, blocks in order.
        targets: int64, other blocks in order, with room for them.
    """
    size = pool.block_size
    heads = torch.arange(pool.num_kv_heads, device=chosen.device)[:, None]
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    to = (targets[places // size], places % size)
    for layer, each in enumerate(chosen):  # [num_kv_heads, num_entries]
        here = (sources[each // size], layer, slice(None), heads, each % size)
        there = (to[0], layer, slice(None), heads, to[1])
        for stored in _stored(pool):
            stored[there] = stored[here]


def move_entries(pool: KVPool, block_ids: torch.Tensor, source: int, targets: torch.Tensor) -> None:
    """Write one entry of each head over another one, as it is stored, in place.

    Args:
        pool: the K/V.
        block_ids: int64, the blocks of the request.
        source: the place of the entries to move.
        targets: int64 `[num_layers, num_kv_heads]`, the places to which they are moved.
    """
    size = pool.block_size
    layers = torch.arange(pool.num_layers, device=targets.device)[:, None]
    heads = torch.arange(pool.num_kv_heads, device=targets.device)
    here = (block_ids[source // size], layers, slice(None), heads, source % size)
    there = (block_ids[targets // size], layers, slice(None), heads, targets % size)
    for stored in _stored(pool):
        stored[there] = stored[here]


def _stored(pool: KVPool) -> list[torch.Tensor]:
    return [pool.values] if pool.scales is None else [pool.values, pool.scales]
