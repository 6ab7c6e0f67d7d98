"""A router's view of its replicas' caches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from radixkv.api.events import DEVICE, AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.errors import ConfigError
from radixkv.routing.block_index import BlockIndex
from radixkv.routing.candidate import Hits
from radixkv.routing.event_cursor import EventCursor, Verdict

# Indices of tiers, by their names in events. Stores of other packages are ignored, because the router does not know
# whether replicas share them, or how fast they are.
_NUM_TIERS = 4
_DEVICE, _HOST, _DISK, _SHARED = range(_NUM_TIERS)
_TIERS = {DEVICE: _DEVICE, "host": _HOST, "disk": _DISK, "redis": _SHARED, "mooncake": _SHARED}
_MAX_BLOCKS = 4_000_000  # 0.35 GB
_MAX_STORE_SHARE = 0.5  # above this share, new blocks in stores are not recorded, so that devices have room
_EXPECT_S = 30.0


class _ReplicaBits:
    """The holder bits of one replica: those of its tiers, and of prompts that were recently sent to it.

    A bit is 0 until there are blocks.
    """

    __slots__ = ("current", "cursor", "previous", "tiers")

    def __init__(self) -> None:
        self.cursor = EventCursor()
        self.tiers = [0] * _NUM_TIERS
        self.current = self.previous = 0  # prompts sent in this period of `expect_s`, and in the previous one

    @property
    def expected(self) -> int:
        """The bits of both periods."""
        return self.current | self.previous


class FleetView:
    """Tracks which replica has which blocks, from its events and from the prompts that were recently sent to it.

        events of a replica ──▶ cursor ──▶ bits of its tiers ──┐
        requests sent to it ──────────▶ bits, for 30 to 60 s ──┴─▶ match: hits of each replica

    A prefix that was just sent to a replica is expected there until its events arrive, so that the next request with
    this prefix is routed to the same replica. An expectation expires, because only events show that the replica has
    computed the prefix.

    Blocks that one replica reports in a shared store can be loaded by all replicas. Matching assumes that stores, like
    devices, evict a prompt from its end. If a block in the middle is missing in a store because a save failed, a match
    may be too long.

    A view is not thread-safe.

    Args:
        block_size: tokens of an event block, the same for all replicas.
        max_blocks: maximum number of tracked blocks, of all replicas together.
        expect_s: minimum time in seconds for which a sent prefix is expected; it may be up to twice as long.
        clock: a monotonic clock in seconds.

    Attributes:
        block_size: see above.
        index: which replicas have each block.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int = _MAX_BLOCKS,
        expect_s: float = _EXPECT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.index = BlockIndex(max_blocks)
        self._max_blocks_of_stores = int(_MAX_STORE_SHARE * max_blocks)
        self._expect_s = expect_s
        self._clock = clock
        self._period_end_s = clock() + expect_s
        self._replicas: dict[str, _ReplicaBits] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas, in the order in which they joined."""
        return tuple(self._replicas)

    def join(self, name: str) -> None:
        """Add a replica with an empty cache, or reset one."""
        self.leave(name)
        self._replicas[name] = _ReplicaBits()

    def leave(self, name: str) -> None:
        """Remove a replica, if it is known. Complexity: O(1)."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            for bit in (*replica.tiers, replica.current, replica.previous):
                self.index.forget_holder(bit)

    def number_of(self, name: str) -> int:
        """Return the sequence number to subscribe from: that of the last batch, or 0 for a snapshot."""
        return self._replicas[name].cursor.number

    def is_up_to_date(self, name: str) -> bool:
        """Whether the events of a replica were read without a gap. The state before a gap is kept until a snapshot."""
        return self._replicas[name].cursor.is_up_to_date

    def request_snapshot(self, name: str) -> None:
        """Record that the replica does not know the last sequence number, so that a snapshot is needed."""
        self._replicas[name].cursor.request_snapshot()

    def read(self, name: str, batch: EventBatch) -> bool:
        """Apply a batch of events of a replica.

        Args:
            name: name of the replica.
            batch: the next batch of its log.

        Returns:
            False if batches are missing: subscribe again from 0, for a snapshot.

        Raises:
            ConfigError: the event blocks have another size, so that no prompt would match.

        Complexity: O(blocks).
        """
        self.tidy()
        replica = self._replicas[name]
        verdict = replica.cursor.take(batch)
        if verdict is Verdict.APPLY:
            for event in batch.events:
                if isinstance(event, AllCleared):
                    self._clear(replica, is_purge=batch.snapshot is None)
                else:
                    self._apply(replica, event)
        return verdict is not Verdict.RESYNC

    def expect(self, name: str, hashes: Sequence[int], num_matched: int = 0) -> None:
        """Record that a prompt was sent to a replica, which will have its blocks.

        Args:
            name: name of the replica.
            hashes: hashes of the prompt's blocks.
            num_matched: number of leading blocks that `match` found on the device of the replica.

        Complexity: O(blocks that the replica does not have).
        """
        self.tidy()
        replica = self._replicas[name]
        replica.current = replica.current or self.index.add_holder()
        if num_matched and self.index.holders_of(hashes[num_matched - 1]) & (replica.tiers[_DEVICE] | replica.current):
            hashes = hashes[num_matched:]
        self.index.store(replica.current, hashes)

    def tidy(self) -> None:
        """Expire old expectations, and sweep a part of the removed holders.

        `read` and `expect` also do this. If they are rarely called, call `tidy` several times per second.
        """
        now_s = self._clock()
        if now_s >= self._period_end_s:
            is_long_over = now_s >= self._period_end_s + self._expect_s
            self._period_end_s += self._expect_s * (1 + (now_s - self._period_end_s) // self._expect_s)
            for replica in self._replicas.values():
                self._end_period(replica)
                if is_long_over:
                    self._end_period(replica)
        self.index.sweep()

    def match(self, hashes: Sequence[int], names: Iterable[str]) -> list[Hits]:
        """Match a prompt with each replica: consecutive blocks from its beginning, each in its fastest tier.

        Args:
            hashes: hashes of the prompt's blocks.
            names: names of the replicas.

        Complexity: O(blocks + replicas * changes of holders along the prompt).
        """
        runs = self.index.runs(hashes)
        ends = itertools.accumulate((num for _, num in runs), initial=0)
        # By the number of runs, from the beginning on, that the device has.
        device_hits = [Hits(num_blocks * self.block_size) for num_blocks in ends]
        replicas, shared = self._replicas, self._shared_bits()
        matched = []
        for name in names:
            replica = replicas[name]
            tiers = replica.tiers
            device = tiers[_DEVICE] | replica.current | replica.previous
            for depth, (holders, _) in enumerate(runs):
                if not holders & device:
                    if holders & (tiers[_HOST] | tiers[_DISK] | shared):
                        tiers_bits = (device, tiers[_HOST], tiers[_DISK], shared)
                        matched.append(self._hits_beyond_device(tiers_bits, runs[depth:], device_hits[depth].device))
                    else:
                        matched.append(device_hits[depth])
                    break
            else:
                matched.append(device_hits[-1])
        return matched

    def _shared_bits(self) -> int:
        bits = 0
        for replica in self._replicas.values():
            bits |= replica.tiers[_SHARED]
        return bits

    def _hits_beyond_device(
        self, tiers_bits: tuple[int, int, int, int], runs: Sequence[tuple[int, int]], device_tokens: int
    ) -> Hits:
        """Continue the match at a block that is not on the device. Later blocks may be on it again."""
        tokens = [device_tokens, 0, 0, 0]
        for holders, num_blocks in runs:
            tier = next((index for index, bits in enumerate(tiers_bits) if holders & bits), None)
            if tier is None:
                break
            tokens[tier] += num_blocks * self.block_size
        return Hits(*tokens)

    def _end_period(self, replica: _ReplicaBits) -> None:
        self.index.forget_holder(replica.previous)
        replica.previous, replica.current = replica.current, 0

    def _clear(self, replica: _ReplicaBits, *, is_purge: bool) -> None:
        for tier in (_DEVICE,) if is_purge else range(_NUM_TIERS):
            self.index.forget_holder(replica.tiers[tier])
            replica.tiers[tier] = 0
        if is_purge:  # a snapshot keeps the expectations, since it lacks the prompts that are still being computed
            self._end_period(replica)
            self._end_period(replica)

    def _apply(self, replica: _ReplicaBits, event: BlocksStored | BlocksRemoved) -> None:
        tier = _TIERS.get(event.tier)
        if tier is None:
            return
        hashes: list[int] = np.frombuffer(event.block_hashes, "<u8").tolist()
        if isinstance(event, BlocksStored):
            if event.block_size != self.block_size:
                raise ConfigError(
                    f"events.block_size: expected {self.block_size} tokens, as all replicas have, "
                    f"got {event.block_size}"
                )
            replica.tiers[tier] = replica.tiers[tier] or self.index.add_holder()
            self.index.store(replica.tiers[tier], hashes, None if tier == _DEVICE else self._max_blocks_of_stores)
        else:
            self.index.remove(replica.tiers[tier] | (replica.expected if tier == _DEVICE else 0), hashes)
