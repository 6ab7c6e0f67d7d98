"""Simulated tiers below the cache: the real decisions about blocks, without their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from radixkv.cache.lease import Lease
from radixkv.errors import ConfigError
from radixkv.namespace import Namespace
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock, StoredBlock
from radixkv.offload.index.tier_index import TierIndex
from radixkv.offload.tiers.block_object import object_bytes
from radixkv.offload.tiers.slot_file import SlotSizes
from radixkv.tokens import TOKEN_BYTES

_UNBOUNDED_BLOCKS = 2**62
_HOST_ALIGNMENT = 64  # as in radixkv/offload/tiers/host.py, which needs torch


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of a tier.

    Attributes:
        name: such as `host`.
        capacity_tokens: capacity in tokens; None if unbounded.
    """

    name: str
    capacity_tokens: int | None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The use of a tier in a simulation.

    Attributes:
        tier: name of the tier.
        capacity_tokens: capacity in tokens; None if unbounded.
        cached_tokens: prompt tokens that were loaded from it.
        token_hit_rate: `cached_tokens` divided by all prompt tokens.
        written_blocks: blocks that were written to it.
        held_blocks: blocks that it holds at the end.
    """

    tier: str
    capacity_tokens: int | None
    cached_tokens: int
    token_hit_rate: float
    written_blocks: int
    held_blocks: int


class SimulatedTiers:
    """Tiers that store blocks immediately, with the real `OffloadIndex`.

    The order of calls is that of the engine: look up before the lease, save the blocks that it evicts, then load.

    Args:
        tiers: the tiers, the fastest first. Capacities are rounded down to whole blocks.
        block_size: tokens per block.

    Attributes:
        index: the index, which is a listener of the cache.
        cached_tokens, written_blocks: see `TierUsage`, by name.
    """

    def __init__(self, tiers: Sequence[TierCapacity], block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        tier_indexes = [TierIndex(tier.name, _num_blocks(tier, block_size)) for tier in tiers]
        self.index = OffloadIndex(tier_indexes, self._key_blocks, block_size)
        self.cached_tokens: Counter[str] = Counter()
        self.written_blocks: Counter[str] = Counter()

    def save(self) -> None:
        """Store the blocks that were evicted from the cache since the last call."""
        evicted_blocks, _ = self.index.take_evicted_blocks()
        for each in evicted_blocks:
            for name in each.tiers:
                self.written_blocks[name] += 1
                self.index.stored(name, [each.block.key])

    def load(self, lease: Lease, first_block: int, run: Sequence[StoredBlock]) -> int:
        """Load the blocks that were found for a lease.

        Args:
            lease: its cached tokens are on the device.
            first_block: index of the first block of `run` in the prompt.
            run: what `OffloadIndex.find` found before the lease.

        Returns:
            Number of loaded tokens.
        """
        start, size = lease.cached_tokens, self._block_size
        first = start // size
        found = run[first - first_block :] if first >= first_block else ()
        if not found:
            return 0
        self.cached_tokens.update({name: size * num for name, num in Counter(each.tier for each in found).items()})
        self.cached_tokens[found[0].tier] -= start - first * size  # the beginning of that block is on the device
        self.index.loaded([each.block.key for each in found])
        return (first + len(found)) * size - start

    def uses(self, num_prompt_tokens: int) -> tuple[TierUsage, ...]:
        """Return the use of each tier."""
        return tuple(
            TierUsage(
                tier.name,
                tier.capacity_tokens,
                self.cached_tokens[tier.name],
                self.cached_tokens[tier.name] / num_prompt_tokens,
                self.written_blocks[tier.name],
                len(self.index.tiers[tier.name]),
            )
            for tier in self._tiers
        )

    def _key_blocks(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        """Return the keys of the full blocks of a prompt; all prompts have the same namespace."""
        size = self._block_size * TOKEN_BYTES
        parent = parent or b""
        for start in range(0, len(tokens) - size + 1, size):
            own = tokens[start : start + size]
            key = xxh3_128_digest(parent + own)
            yield KeyedBlock(key, parent, own, namespace)
            parent = key


def tier_capacity_tokens(name: str, num_bytes: int, token_bytes: int, block_size: int) -> int:
    """Return the capacity of a tier in tokens of whole blocks, in slots as used by `host` and `disk`.

    A slot contains the key, the tokens and the checksum of the block in addition to its K/V. On `disk` it takes whole
    pages.

    >>> tier_capacity_tokens("host", 16 * 10**9, token_bytes=131_072, block_size=64)
    122048

    Raises:
        ConfigError: no block fits.
    """
    payload_bytes = block_size * token_bytes
    num_bytes_each = object_bytes(block_size, payload_bytes)
    slot_bytes = -(-num_bytes_each // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
    if name == "disk":
        slot_bytes = SlotSizes.of(num_bytes_each, payload_bytes).slot_bytes
    if num_bytes < slot_bytes:
        raise ConfigError(f"tier {name}: expected room for a block, {slot_bytes} bytes, got {num_bytes}")
    return num_bytes // slot_bytes * block_size


def check_tiers(tiers: Sequence[TierCapacity], block_size: int) -> None:
    """Validate tiers before anything is replayed.

    Raises:
        ConfigError: two tiers have the same name, or one is smaller than a block.
    """
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"tier {name}: expected each tier once, got {names.count(name)}")
    for tier in tiers:
        if not _num_blocks(tier, block_size):
            raise ConfigError(
                f"tier {tier.name}: expected room for at least a block of {block_size} tokens, "
                f"got {tier.capacity_tokens} tokens"
            )


def _num_blocks(tier: TierCapacity, block_size: int) -> int:
    return _UNBOUNDED_BLOCKS if tier.capacity_tokens is None else tier.capacity_tokens // block_size
