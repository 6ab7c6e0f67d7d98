"""The K/V entries that one generation keeps, and which of them is dropped next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.blocks import BlockIds
from radixkv.compute.compression.attention_mass import attention_mass
from radixkv.compute.compression.choices import first_and_last, heaviest_and_last
from radixkv.compute.compression.entries import copy_entries, move_entries
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring


@dataclass(frozen=True, slots=True)
class Rule:
    """Bounds on what is kept.

    Attributes:
        num_entries: entries of the prompt that are kept at most; and of all tokens, if `drops_generated`.
        num_sinks: first tokens that are never dropped.
        num_recent: last tokens that are never dropped.
        num_observed: last queries of the prompt whose attention chooses; 0 chooses without.
        is_pooled: whether neighbors share their mass in the prompt.
        drops_generated: whether entries are dropped while tokens are generated, too.
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
    """Entries of one generation in its private blocks. All heads have equally many, each its own.

    The place of an entry says nothing: a dropped one is replaced by the last, and K carry the rotation of their true
    positions. Attention does not ask for an order.

        kept     [ p0 p1 p4 p7 )                 the lightest is p4
        dropped  [ p0 p1 p7 )                    p7 took its place
        step     [ p0 p1 p7 p8 )                 the new token is the last one

    Implements `QueryWatcher` for the steps of the generation. What a step showed counts once the step is over and
    `append` is called, so a step that failed and is computed again counts once.

    Args:
        pool: the K/V memory.
        rule: what is kept.
        block_ids: the private blocks.
        positions: int64 `[num_layers, num_kv_heads, num_entries]`, of what is in them.
        mass: float32, the same shape: the attention that these got so far; None without observation.
    """

    def __init__(
        self,
        pool: KVPool,
        rule: Rule,
        block_ids: BlockIds,
        positions: torch.Tensor,
        mass: torch.Tensor | None,
    ) -> None:
        self._pool = pool
        self._rule = rule
        self._block_ids = torch.from_numpy(block_ids).long()
        self._positions = positions
        self._mass = mass
        self._seen: dict[int, torch.Tensor] = {}  # by layer, of the step under way

    @classmethod
    def of_prompt(cls, runner: Runner, rule: Rule, prompt: Chunk, block_ids: BlockIds) -> KeptEntries:
        """Choose what is kept of a prompt, and copy it into private blocks. The prompt's own blocks stay as they are.

        The last queries are computed once more where their attention chooses, so that the choice is the same whatever
        was cached.

        Args:
            runner: holds the K/V.
            rule: what is kept.
            prompt: all tokens of the prompt, whose K/V are in its blocks.
            block_ids: the private blocks, with room for what is kept.
        """
        pool, num_tokens = runner.storage.pool, prompt.end
        num_kept = min(rule.num_entries, num_tokens)
        observed = None if rule.num_observed == 0 else _observe(runner, prompt, min(rule.num_observed, num_tokens))
        if num_kept == num_tokens:
            chosen = torch.arange(num_tokens)
        elif observed is None:
            chosen = first_and_last(num_tokens, rule.num_sinks, num_kept)
        else:
            chosen = heaviest_and_last(observed, rule.num_recent, num_kept, is_pooled=rule.is_pooled)
        positions = chosen.expand(pool.num_layers, pool.num_kv_heads, num_kept).contiguous()
        sources, targets = (torch.from_numpy(ids).long() for ids in (prompt.block_ids, block_ids))
        copy_entries(pool, positions, sources, targets)
        mass = observed.gather(-1, positions) if observed is not None and rule.weighs_generated else None
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
        """Whether it has to see the queries of each step."""
        return self._rule.weighs_generated

    def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        """See `QueryWatcher.see`."""
        num_entries = self.num_entries + query.shape[0]
        self._seen[layer] = attention_mass(query, self._pool, layer, self._block_ids, num_entries, scoring)

    def append(self, position: int) -> None:
        """Note that a step has written the entries of one more token."""
        new = torch.full((*self._positions.shape[:2], 1), position)
        self._positions = torch.cat((self._positions, new), dim=-1)
        if self._mass is not None:
            seen = torch.stack([self._seen[layer] for layer in range(self._pool.num_layers)])
            self._mass = torch.cat((self._mass, torch.zeros_like(new, dtype=torch.float32)), dim=-1) + seen
        self._seen = {}

    def drop(self) -> None:
        """Drop an entry of each head that is neither a first token nor recent: the lightest, or else the oldest.

        Recent are those that will be among the last `num_recent` tokens with the next one.
        """
        last = int(self._positions.max())
        is_free = (self._positions >= self._rule.num_sinks) & (self._positions <= last + 1 - self._rule.num_recent)
        order = self._positions.float() if self._mass is None else self._mass
        places = order.masked_fill(~is_free, float("inf")).argmin(dim=-1)  # [num_layers, num_kv_heads]
        end = self.num_entries - 1
        move_entries(self._pool, self._block_ids, end, places)
        self._positions = _without(self._positions, places)
        self._mass = None if self._mass is None else _without(self._mass, places)


class _Observation:
    """Watches the last queries of a prompt."""

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
    observation = _Observation(runner.storage.pool, prompt)
    runner.observe(prompt, num_observed, observation)
    return torch.stack([observation.masses[layer] for layer in range(runner.storage.pool.num_layers)])


def _without(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Leave out the last value of each row, after it has taken the place of another one."""
    values = values.scatter(-1, places[..., None], values[..., -1:])
    return values[..., :-1].contiguous()
