"""The K/V entries that one generation keeps, and which of them is dropped next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d

from radixkv.blocks import BlockIds
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import dequantize, key_dtype
from radixkv.kernels.scoring import Scoring

_POOLING_SIZE = 5  # kernel size of the average pooling, as in the published code of SnapKV
_QUERIES_AT_ONCE = 16  # scores of 16 queries, 32 heads and 32,768 entries take 64 MiB


def copy_entries(pool: KVPool, chosen: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy chosen entries, in their stored format, into the first slots of other blocks, in place.

    Args:
        pool: the K/V.
        chosen: int64 `[num_layers, num_kv_heads, num_entries]`, indices of entries in `sources`.
        sources: int64, blocks in order.
        targets: int64, other blocks in order, with room for the chosen entries.
    """
    block_size = pool.block_size
    heads = torch.arange(pool.num_kv_heads, device=chosen.device)[:, None]
    target_entries = torch.arange(chosen.shape[-1], device=chosen.device)
    for layer, source_entries in enumerate(chosen):  # [num_kv_heads, num_entries]
        source_slots = (sources[source_entries // block_size], layer, slice(None), heads, source_entries % block_size)
        target_slots = (targets[target_entries // block_size], layer, slice(None), heads, target_entries % block_size)
        for stored in _stored_tensors(pool):
            stored[target_slots] = stored[source_slots]


def move_entries(pool: KVPool, block_ids: torch.Tensor, source: int, targets: torch.Tensor) -> None:
    """Overwrite one entry of each head by another one, in its stored format, in place.

    Args:
        pool: the K/V.
        block_ids: int64, the blocks of the request.
        source: the index of the entry to move, the same for all heads.
        targets: int64 `[num_layers, num_kv_heads]`, the indices of the entries that are overwritten.
    """
    block_size = pool.block_size
    layers = torch.arange(pool.num_layers, device=targets.device)[:, None]
    heads = torch.arange(pool.num_kv_heads, device=targets.device)
    source_slots = (block_ids[source // block_size], layers, slice(None), heads, source % block_size)
    target_slots = (block_ids[targets // block_size], layers, slice(None), heads, targets % block_size)
    for stored in _stored_tensors(pool):
        stored[target_slots] = stored[source_slots]


def _stored_tensors(pool: KVPool) -> list[torch.Tensor]:
    return [pool.values] if pool.scales is None else [pool.values, pool.scales]


def first_and_last(num_tokens: int, num_sinks: int, num_entries: int) -> torch.Tensor:
    """Choose the first `num_sinks` tokens and the last ones, `num_entries` tokens together.

    Returns:
        Positions, int64 `[num_entries]`.
    """
    first = torch.arange(num_sinks)
    return torch.cat((first, torch.arange(num_tokens - (num_entries - num_sinks), num_tokens)))


def heaviest_and_last(mass: torch.Tensor, window: int, num_entries: int, *, is_pooled: bool) -> torch.Tensor:
    """Choose the last tokens, and those with the largest mass among the others. Of equal masses, the first ones win.

    Args:
        mass: attention mass, float32 `[num_layers, num_kv_heads, num_tokens]`.
        window: number of last tokens that are always chosen, below `num_entries`.
        num_entries: number of tokens to choose, below `num_tokens`.
        is_pooled: whether the mass of a token is averaged over its neighbors, so that adjacent tokens stay together.

    Returns:
        Positions, int64 `[num_layers, num_kv_heads, num_entries]`.
    """
    num_tokens = mass.shape[-1]
    earlier_mass = mass[..., : num_tokens - window]
    if is_pooled:
        earlier_mass = avg_pool1d(earlier_mass, _POOLING_SIZE, stride=1, padding=_POOLING_SIZE // 2)
    order = earlier_mass.sort(dim=-1, descending=True, stable=True).indices
    heaviest = order[..., : num_entries - window].sort(dim=-1).values
    last = torch.arange(num_tokens - window, num_tokens, device=mass.device)
    return torch.cat((heaviest, last.expand(*mass.shape[:2], window)), dim=-1)


def attention_mass(
    query: torch.Tensor, pool: KVPool, layer: int, block_ids: torch.Tensor, num_entries: int, scoring: Scoring
) -> torch.Tensor:
    """Sum the attention weights that each entry receives from the last queries of a request.

    The computation is in float32 and reads nothing of other requests, so the result is batch-invariant.

    Args:
        query: `[num_queries, num_query_heads, head_dim]`, the queries of the last entries.
        pool: the K/V, which already contain the entries of the queries.
        layer: index into the pool's layers.
        block_ids: int64, the request's blocks.
        num_entries: entries in these blocks.
        scoring: how scores are computed; without a window.

    Returns:
        float32 `[num_kv_heads, num_entries]`: sums over the queries and over the query heads that share a KV head.
    """
    assert scoring.window is None, "entries are not ordered by position, so a window cannot be applied"
    num_kv_heads = pool.num_kv_heads
    stored_keys = pool.keys[block_ids, layer]  # [num_blocks, num_kv_heads, block_size, head_dim]
    if pool.scales is None:
        key = stored_keys.float()
    else:
        key = dequantize(stored_keys, pool.scales[block_ids, layer, 0], key_dtype(pool.dtype))
    key = key.transpose(0, 1).flatten(1, 2)[:, :num_entries]  # [num_kv_heads, num_entries, head_dim]
    first_query_entry = num_entries - query.shape[0]
    mass = torch.zeros(num_kv_heads, num_entries, device=query.device)
    for start in range(0, query.shape[0], _QUERIES_AT_ONCE):
        rows = query[start : start + _QUERIES_AT_ONCE].float()
        by_head = torch.unflatten(rows, 1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
        scores = torch.matmul(by_head, key[:, None].transpose(2, 3)) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        entries = torch.arange(num_entries, device=query.device)
        query_entries = first_query_entry + start + torch.arange(rows.shape[0], device=query.device)
        scores = scores.masked_fill(
            entries > query_entries[:, None], float("-inf")
        )  # [kv_heads, group, rows, num_entries]
        if scoring.sinks is not None:
            sinks = torch.unflatten(scoring.sinks.float(), 0, (num_kv_heads, -1))[:, :, None, None]
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        mass += scores.softmax(dim=-1)[..., :num_entries].sum(dim=(1, 2))
    return mass


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Which K/V entries a generation keeps.

    Attributes:
        num_entries: maximum number of kept entries of the prompt, or of all tokens if `drops_generated`.
        num_sinks: first tokens that are never dropped.
        num_recent: last tokens that are never dropped.
        num_observed: last queries of the prompt whose attention decides; 0 to decide by position.
        is_pooled: whether the attention mass of the prompt is averaged over neighbors.
        drops_generated: whether entries are also dropped while tokens are generated.
    """

    num_entries: int
    num_sinks: int
    num_recent: int
    num_observed: int
    is_pooled: bool
    drops_generated: bool

    @property
    def weighs_generated(self) -> bool:
        """Whether the attention of generated tokens counts."""
        return self.drops_generated and self.num_observed > 0


class KeptEntries:
    """The K/V entries of one generation in its private blocks. Each head has its own entries, and all equally many.

    Entries are not ordered: the last entry takes the slot of a dropped one. Keys keep the rotation of their original
    positions, and attention does not depend on the order.

        kept     [ p0 p1 p4 p7 )                 the lightest is p4
        dropped  [ p0 p1 p7 )                    p7 took its place
        step     [ p0 p1 p7 p8 )                 the new token is the last one

    Implements `QueryWatcher` for the steps of the generation. The attention of a step is added when `append` is called
    after the step, so a step that failed and is computed again counts once.

    Args:
        pool: the K/V memory.
        rule: decides which entries are kept.
        block_ids: the private blocks.
        positions: int64 `[num_layers, num_kv_heads, num_entries]`, the token position of each entry.
        mass: float32, the same shape: the attention that each entry has received so far; None if it is not observed.
    """

    def __init__(
        self,
        pool: KVPool,
        rule: KeepRule,
        block_ids: BlockIds,
        positions: torch.Tensor,
        mass: torch.Tensor | None,
    ) -> None:
        self._pool = pool
        self._rule = rule
        self._block_ids = torch.from_numpy(block_ids).long()
        self._positions = positions
        self._mass = mass
        self._step_mass: dict[int, torch.Tensor] = {}  # of the current step, by layer

    @classmethod
    def of_prompt(cls, runner: Runner, rule: KeepRule, prompt: Chunk, block_ids: BlockIds) -> KeptEntries:
        """Choose the kept entries of a prompt, and copy them into private blocks. The prompt's blocks do not change.

        If the rule depends on attention, the last queries are computed once more, so that the choice does not depend on
        what was cached.

        Args:
            runner: holds the K/V.
            rule: decides which entries are kept.
            prompt: all tokens of the prompt, whose K/V are in its blocks.
            block_ids: the private blocks, with room for the kept entries.
        """
        pool, num_tokens = runner.storage.pool, prompt.end
        num_kept = min(rule.num_entries, num_tokens)
        prompt_mass = None if rule.num_observed == 0 else _observe(runner, prompt, min(rule.num_observed, num_tokens))
        if num_kept == num_tokens:
            chosen = torch.arange(num_tokens)
        elif prompt_mass is None:
            chosen = first_and_last(num_tokens, rule.num_sinks, num_kept)
        else:
            chosen = heaviest_and_last(prompt_mass, rule.num_recent, num_kept, is_pooled=rule.is_pooled)
        positions = chosen.expand(pool.num_layers, pool.num_kv_heads, num_kept).contiguous()
        sources, targets = (torch.from_numpy(ids).long() for ids in (prompt.block_ids, block_ids))
        copy_entries(pool, positions, sources, targets)
        mass = None
        if prompt_mass is not None and rule.weighs_generated:
            mass = prompt_mass.gather(-1, positions)
        return cls(pool, rule, block_ids, positions, mass)

    @property
    def num_entries(self) -> int:
        """Entries that each head has now."""
        return self._positions.shape[-1]

    @property
    def is_full(self) -> bool:
        """Whether an entry has to be dropped before the next token."""
        return self._rule.drops_generated and self.num_entries >= self._rule.num_entries

    @property
    def watches(self) -> bool:
        """Whether it must observe the queries of each step."""
        return self._rule.weighs_generated

    def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        """See `QueryWatcher.see`."""
        num_entries = self.num_entries + query.shape[0]
        self._step_mass[layer] = attention_mass(query, self._pool, layer, self._block_ids, num_entries, scoring)

    def append(self, position: int) -> None:
        """Record that a step has written the entries of one more token."""
        new_positions = torch.full((*self._positions.shape[:2], 1), position)
        self._positions = torch.cat((self._positions, new_positions), dim=-1)
        if self._mass is not None:
            step_mass = torch.stack([self._step_mass[layer] for layer in range(self._pool.num_layers)])
            new_mass = torch.zeros_like(new_positions, dtype=torch.float32)
            self._mass = torch.cat((self._mass, new_mass), dim=-1) + step_mass
        self._step_mass = {}

    def drop(self) -> None:
        """Drop an entry of each head: the one with the least attention, or the oldest if attention is not observed.

        First tokens and recent tokens are kept. Recent tokens are those that will be among the last `num_recent` tokens
        after the next one.
        """
        last_position = int(self._positions.max())
        first_recent = last_position + 2 - self._rule.num_recent
        can_drop = (self._positions >= self._rule.num_sinks) & (self._positions < first_recent)
        ranking = self._positions.float() if self._mass is None else self._mass
        dropped = ranking.masked_fill(~can_drop, float("inf")).argmin(dim=-1)  # [num_layers, num_kv_heads]
        move_entries(self._pool, self._block_ids, self.num_entries - 1, dropped)
        self._positions = _remove_one(self._positions, dropped)
        self._mass = None if self._mass is None else _remove_one(self._mass, dropped)


class _PromptWatcher:
    """Observes the last queries of a prompt."""

    def __init__(self, pool: KVPool, prompt: Chunk) -> None:
        self._pool = pool
        self._block_ids = torch.from_numpy(prompt.block_ids).long()
        self._num_tokens = prompt.end
        self.masses: dict[int, torch.Tensor] = {}

    def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        """See `QueryWatcher.see`."""
        self.masses[layer] = attention_mass(query, self._pool, layer, self._block_ids, self._num_tokens, scoring)


def _observe(runner: Runner, prompt: Chunk, num_observed: int) -> torch.Tensor:
    """Return the attention of the last queries of a prompt, float32 `[num_layers, num_kv_heads, num_tokens]`."""
    watcher = _PromptWatcher(runner.storage.pool, prompt)
    runner.observe(prompt, num_observed, watcher)
    return torch.stack([watcher.masses[layer] for layer in range(runner.storage.pool.num_layers)])


def _remove_one(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Remove the value at one index of each row. The last value of the row takes its place."""
    values = values.scatter(-1, indices[..., None], values[..., -1:])
    return values[..., :-1].contiguous()
