"""K/V cache events: blocks of tokens that were stored in the cache or a tier, and blocks that were removed.

An event block is a run of `events.block_size` tokens that begins at a multiple of this number in the prompt; the block
size of the pool does not matter. Its hash covers all tokens up to its end. Hashes and tokens are packed, so an event
needs no object per token.
"""

from __future__ import annotations

from dataclasses import dataclass

HASH_BYTES = 8
DEVICE = "device"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks that can be matched from now on, or blocks, in any order, that a tier has from now on.

    Attributes:
        parent_hash: hash of the block before the first one; None at the beginning of a prompt, and for a tier.
        block_hashes: little-endian uint64 hashes, in order.
        tokens: little-endian uint32 token ids of all blocks; empty for a tier.
        block_size: tokens per block.
        cache_salt: opaque name of the namespace. A reader must only match blocks with the salt of the prompt's
            namespace. It is empty for the one namespace whose blocks may be matched by tokens alone.
        tier: where the blocks are: `DEVICE`, or the name of a tier, such as `host`.
    """

    parent_hash: int | None
    block_hashes: bytes
    tokens: bytes
    block_size: int
    cache_salt: str
    tier: str = DEVICE

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of one namespace that can no longer be matched, or that a tier no longer has.

    Attributes:
        block_hashes: little-endian uint64 hashes.
        cache_salt: as they were stored.
        tier: where they were.
    """

    block_hashes: bytes
    cache_salt: str
    tier: str = DEVICE

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The device holds no blocks of any namespace any more. In a snapshot, the reader also forgets those of tiers."""


Event = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The position of a batch among the batches of a snapshot, which together list all current blocks.

    Attributes:
        index: position, from 0.
        count: batches of the snapshot.
        num_blocks: blocks of the whole snapshot on the device.
    """

    index: int
    count: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """The events of one step, in order; parents are stored before their children.

    Attributes:
        sequence_number: rises by 1 from batch to batch. All parts of a snapshot have the number of the last batch
            before the snapshot.
        time_s: Unix time at which it was published.
        events: in the order in which they happened.
        snapshot: the position in a snapshot; None for a batch of changes.
    """

    sequence_number: int
    time_s: float
    events: tuple[Event, ...]
    snapshot: SnapshotPart | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that its events name."""
        return sum(event.num_blocks for event in self.events if not isinstance(event, AllCleared))

    @property
    def device_events(self) -> tuple[Event, ...]:
        """The events without the events of tiers, for readers that only track the device."""
        return tuple(event for event in self.events if isinstance(event, AllCleared) or event.tier == DEVICE)
