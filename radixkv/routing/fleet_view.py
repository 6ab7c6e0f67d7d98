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

# Places of a replica's blocks, by the names of tiers in its events. Stores of other packages do not count: nobody knows
# whether replicas share them, or how fast they are.
_NUM_PLACES = 4
_DEVICE, _HOST, _DISK, _SHARED = range(_NUM_PLACES)
_PLACES = {DEVICE: _DEVICE, "host": _HOST, "disk": _DISK, "redis": _SHARED, "mooncake": _SHARED}
_MAX_BLOCKS = 4_000_000  # 0.6 GB
_MOST_WITH_STORES = 0.5  # of these: beyond, stores' new blocks are not noted, so that devices have room
_EXPECT_S = 30.0


class _Known:
    """The bits of one replica: what its tiers hold, and what it was sent of late. 0 where it never had anything."""

    __slots__ = ("before", "cursor", "lately", "tiers")

    def __init__(self) -> None:
        self.cursor = EventCursor()
        self.tiers = [0] * _NUM_PLACES
        self.lately = self.before = 0  # sent in this turn of `expect_s`, and in the one before

    @property
    def expected(self) -> int:
        """The bits of both turns."""
        return self.lately | self.before


class FleetView:
    """Knows which replica has which blocks: from its events, and for a while from what it was sent.

        events of a replica ──▶ cursor ──▶ bits of its tiers ──┐
        requests sent to it ──────────▶ bits, for 30 to 60 s ──┴─▶ match: hits of each replica

    Between events, a prefix that was just sent somewhere is expected there, so the next request for it follows. An
    expectation ends by itself: whether the replica computed the prefix is told by its events alone.

    What one replica knows to be in a shared store, all can load. Stores lose prompts from their ends, too; where one
    has a gap because a save failed, a match may be too long.

    A view belongs to one thread.

    Args:
        block_size: tokens of an event block, the same for all replicas.
        max_blocks: blocks that it remembers, of all replicas together.
        expect_s: seconds for which at least a sent prefix is expected; at most twice as long.
        clock: seconds, never going back.
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
        self._most_with_stores = int(_MOST_WITH_STORES * max_blocks)
        self._expect_s = expect_s
        self._clock = clock
        self._turn_s = clock() + expect_s
        self._replicas: dict[str, _Known] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas, in the order in which they came."""
        return tuple(self._replicas)

    def join(self, name: str) -> None:
        """Add a replica of which nothing is known. One that is there is forgotten first."""
        self.leave(name)
        self._replicas[name] = _Known()

    def leave(self, name: str) -> None:
        """Forget a replica; one that is unknown stays so. Complexity: O(1)."""
        known = self._replicas.pop(name, None)
        if known is not None:
            for bit in (*known.tiers, known.lately, known.before):
                self.index.forget_holder(bit)

    def number_of(self, name: str) -> int:
        """Return the sequence number to subscribe from: the last one that was read, 0 for a snapshot."""
        return self._replicas[name].cursor.number

    def is_in_step(self, name: str) -> bool:
        """Whether the events of a replica were read without a gap. What was known before a gap counts until then."""
        return self._replicas[name].cursor.is_in_step

    def lose(self, name: str) -> None:
        """Note that the replica does not know the number that was read last: a snapshot is needed."""
        self._replicas[name].cursor.lose()

    def read(self, name: str, batch: EventBatch) -> bool:
        """Learn from a batch of a replica's events.

        Args:
            name: of the replica.
            batch: the next one of its log.

        Returns:
            Whether it fits. If not, batches are missing: subscribe again from 0, for a snapshot.

        Raises:
            ConfigError: the blocks have another size, so no prompt would ever match.

        Complexity: O(blocks).
        """
        self.tidy()
        known = self._replicas[name]
        verdict = known.cursor.take(batch)
        if verdict is Verdict.READ:
            for event in batch.events:
                if isinstance(event, AllCleared):
                    self._clear(known, is_purge=batch.snapshot is None)
                else:
                    self._learn(known, event)
        return verdict is not Verdict.ASK

    def expect(self, name: str, hashes: Sequence[int], num_matched: int = 0) -> None:
        """Note that a replica was sent a prompt, and will have its blocks.

        Args:
            name: of the replica.
            hashes: of the prompt's blocks.
            num_matched: blocks, from the first on, that `match` found on its device.

        Complexity: O(blocks that are not known to be there).
        """
        self.tidy()
        known = self._replicas[name]
        known.lately = known.lately or self.index.add_holder()
        if num_matched and self.index.holders_of(hashes[num_matched - 1]) & (known.tiers[0] | known.lately):
            hashes = hashes[num_matched:]
        self.index.store(known.lately, hashes)

    def tidy(self) -> None:
        """End expectations whose time is over, and clear a part of what was forgotten.

        All that learns does it too. Where little happens, do it some times a second.
        """
        now_s = self._clock()
        if now_s >= self._turn_s:
            is_all_over = now_s >= self._turn_s + self._expect_s
            self._turn_s += self._expect_s * (1 + (now_s - self._turn_s) // self._expect_s)
            for known in self._replicas.values():
                self._end_turn(known)
                if is_all_over:
                    self._end_turn(known)
        self.index.sweep()

    def match(self, hashes: Sequence[int], names: Iterable[str]) -> list[Hits]:
        """Count what each replica has of a prompt: consecutive blocks from its beginning, each at its nearest place.

        Args:
            hashes: of the prompt's blocks.
            names: replicas.

        Complexity: O(blocks + replicas * changes of holders along the prompt).
        """
        runs = self.index.runs(hashes)
        ends = itertools.accumulate((num for _, num in runs), initial=0)
        upto = [Hits(num_blocks * self.block_size) for num_blocks in ends]  # by the number of runs on the device
        replicas, shared = self._replicas, self._shared_bits()
        matched = []
        for name in names:
            known = replicas[name]
            tiers = known.tiers
            device = tiers[_DEVICE] | known.lately | known.before
            for depth, (holders, _) in enumerate(runs):
                if not holders & device:
                    if holders & (tiers[_HOST] | tiers[_DISK] | shared):
                        places = (device, tiers[_HOST], tiers[_DISK], shared)
                        matched.append(self._lower_hits(places, runs[depth:], upto[depth].device))
                    else:
                        matched.append(upto[depth])
                    break
            else:
                matched.append(upto[-1])
        return matched

    def _shared_bits(self) -> int:
        bits = 0
        for known in self._replicas.values():
            bits |= known.tiers[_SHARED]
        return bits

    def _lower_hits(
        self, places: tuple[int, int, int, int], runs: Sequence[tuple[int, int]], device_tokens: int
    ) -> Hits:
        """Go on where a block is not on the device. A later one may be there again."""
        tokens = [device_tokens, 0, 0, 0]
        for holders, num in runs:
            place = next((index for index, bits in enumerate(places) if holders & bits), None)
            if place is None:
                break
            tokens[place] += num * self.block_size
        return Hits(*tokens)

    def _end_turn(self, known: _Known) -> None:
        self.index.forget_holder(known.before)
        known.before, known.lately = known.lately, 0

    def _clear(self, known: _Known, *, is_purge: bool) -> None:
        for place in (_DEVICE,) if is_purge else range(_NUM_PLACES):
            self.index.forget_holder(known.tiers[place])
            known.tiers[place] = 0
        if is_purge:  # while a snapshot leaves out what is still being computed
            self._end_turn(known)
            self._end_turn(known)

    def _learn(self, known: _Known, event: BlocksStored | BlocksRemoved) -> None:
        place = _PLACES.get(event.tier)
        if place is None:
            return
        hashes: list[int] = np.frombuffer(event.block_hashes, "<u8").tolist()
        if isinstance(event, BlocksStored):
            if event.block_size != self.block_size:
                expected = f"expected {self.block_size} tokens, as all replicas have"
                raise ConfigError(f"events.block_size: {expected}, got {event.block_size}")
            known.tiers[place] = known.tiers[place] or self.index.add_holder()
            self.index.store(known.tiers[place], hashes, None if place == _DEVICE else self._most_with_stores)
        else:
            self.index.remove(known.tiers[place] | (known.expected if place == _DEVICE else 0), hashes)
