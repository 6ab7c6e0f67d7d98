"""Random walks over the cache, every step judged by the oracle.

More of them than the suite runs: `python -m tests.test_cache_stress --steps 1000000 --seed 1`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from radixkv.config import EVICTION_POLICIES
from radixkv.errors import InvalidRequest, LeaseClosed, OutOfBlocks
from radixkv.eviction_policies import make_policy
from radixkv.miss_reason import MissReason
from radixkv.namespace import Namespace
from radixkv.prefix_cache import PrefixCache
from tests.fakes import FakeClock
from tests.oracle import Holder, Oracle

NAMESPACES = (Namespace("m"), Namespace("m", tenant="a"), Namespace("m", adapter="a"), Namespace("m", salt="a"))


@dataclass(frozen=True)
class World:
    """The size of things in one walk: small, so that everything collides."""

    block_size: int
    num_blocks: int
    max_tokens: int
    alphabet: int = 2
    num_namespaces: int = 2
    max_leases: int = 5
    evicts: bool = True


ROOMY = [
    World(block_size=1, num_blocks=600, max_tokens=10, evicts=False),
    World(block_size=2, num_blocks=600, max_tokens=12, evicts=False),
    World(block_size=4, num_blocks=600, max_tokens=21, alphabet=3, evicts=False),
    World(block_size=16, num_blocks=600, max_tokens=70, num_namespaces=4, evicts=False),
]
TIGHT = [
    World(block_size=1, num_blocks=24, max_tokens=8),
    World(block_size=2, num_blocks=20, max_tokens=13),
    World(block_size=4, num_blocks=24, max_tokens=30, alphabet=3),
    World(block_size=4, num_blocks=9, max_tokens=28, num_namespaces=1, max_leases=3),
    World(block_size=16, num_blocks=16, max_tokens=70, num_namespaces=4),
]


class Counts(NamedTuple):
    """What every refused call must leave as it was, in blocks."""

    num_free: int
    num_leased: int
    num_published: int
    num_pinned: int
    num_evicted: int


class Walk:
    """One cache, its oracle, and whoever holds leases. Counts what happened."""

    def __init__(self, world: World, seed: int, policy: str) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.cache = PrefixCache(
            world.num_blocks,
            world.block_size,
            policy=make_policy(policy, world.num_blocks),
            clock=self.clock,
            evicted_prefixes=16,
        )
        self.oracle = Oracle(world.num_blocks, world.block_size)
        self.holders: list[Holder] = []
        self.foreign = PrefixCache(4, world.block_size).lease(NAMESPACES[0], b"\1\0\0\0")
        self.prompts: list[tuple[int, ...]] = [()]
        self.events: Counter[str] = Counter()
        self.actions = {
            self.match: 4,
            self.lease: 8,
            self.write: 4,
            self.commit: 10,
            self.close: 6,
            self.evict: world.evicts,
            self.misuse: 1,
        }

    def step(self) -> None:
        """Do one random thing, then recount everything."""
        self.clock.now_s += self.random.choice((0, 0, 1))
        num_evicted_blocks = self.cache.num_evicted_blocks
        self.random.choices(list(self.actions), list(self.actions.values()))[0]()
        num_evicted_blocks = self.cache.num_evicted_blocks - num_evicted_blocks
        if num_evicted_blocks:
            num_lost_tokens = self.oracle.forget_evicted(self.cache)
            assert num_evicted_blocks <= num_lost_tokens <= num_evicted_blocks * self.world.block_size
            self.events["evicted blocks"] += num_evicted_blocks
        self.cache.check()
        self.oracle.poison_free_blocks(self.cache)
        for holder in self.holders:
            holder.verify()
            assert self.oracle.num_published(holder.identities) >= holder.lease.committed_tokens

    # -- what may happen -------------------------------------------------------------------------------------------

    def match(self) -> None:
        namespace, tokens = self._namespace(), self._prompt()
        match = self.cache.match(namespace, tokens)
        identities = self.oracle.identities(namespace, tokens)
        assert match.cached_tokens == self.oracle.num_reusable(identities)
        self.oracle.verify_match(match, identities)
        reason = self.cache.explain(match.namespace, match.tokens, match.cached_tokens)
        block_end = (match.cached_tokens // self.world.block_size + 1) * self.world.block_size
        assert (reason is MissReason.NONE) == (match.cached_tokens == identities.size - 1)
        if reason is MissReason.EVICTED:
            assert self.oracle.was_published(int(identities[:block_end][-1]))
        self.events[f"explained as {reason.value}"] += 1

    def lease(self) -> None:
        if len(self.holders) == self.world.max_leases:
            return self.close()
        namespace, tokens, read = self._namespace(), self._prompt(), self.random.random() < 0.85
        identities = self.oracle.identities(namespace, tokens)
        num_reusable = self.oracle.num_reusable(identities) if read else 0
        before = self._counts()
        try:
            lease = self.cache.lease(namespace, tokens, read=read)
        except OutOfBlocks:
            num_blocks = -(-identities.size // self.world.block_size)
            assert num_blocks > self.cache.pool.num_free + self.cache.num_evictable_blocks
            assert self._counts() == before
            self.events["out of blocks"] += 1
            return None
        if lease.cached_tokens != num_reusable:  # the block shared in part was given up, for the last block there was
            assert lease.cached_tokens == num_reusable // self.world.block_size * self.world.block_size
            assert self.cache.pool.num_free + self.cache.num_evictable_blocks == 0
            self.events["shared blocks given up"] += 1
        num_new_blocks = lease.block_ids.size - lease.cached_tokens // self.world.block_size
        assert self.cache.num_evicted_blocks - before.num_evicted == max(0, num_new_blocks - before.num_free)
        holder = Holder(self.oracle, lease, identities)
        holder.receive()
        self.holders.append(holder)
        self.events["copies"] += lease.copy is not None
        return None

    def write(self) -> None:
        if holder := self._holder():
            holder.write(self.random.randint(holder.num_written, holder.lease.num_tokens))

    def commit(self) -> None:
        if not (holder := self._holder()):
            return
        if self.random.random() < 0.7:
            holder.write(holder.lease.num_tokens)
        lease, block_size = holder.lease, self.world.block_size
        upto = self.random.choice((holder.num_written, self.random.randint(0, holder.num_written)))
        whole = upto if upto == lease.num_tokens else upto // block_size * block_size
        end = max(whole, lease.committed_tokens)
        if end > lease.committed_tokens:
            holder.begin()  # whoever commits has made the copy
        expected = end - min(end, max(self.oracle.num_published(holder.identities), lease.committed_tokens))
        num_segments, num_published = self.cache.num_segments, self.cache.pool.num_published
        block_ids = lease.block_ids.copy()

        assert lease.commit(upto) == expected

        assert lease.committed_tokens == end
        if end:
            self.oracle.publish(lease.namespace, lease.tokens[: end * 4], holder.identities[:end])
        grown = self.cache.num_segments - num_segments
        self.events["splits"] += grown == 2
        self.events["leaves attached"] += grown == 1
        self.events["leaves grown"] += grown == 0 and expected > 0
        replaced = grown == 0 and expected > 0 and self.cache.pool.num_published == num_published
        self.events["tail blocks replaced"] += replaced
        self.events["blocks adopted"] += int(np.count_nonzero(block_ids != lease.block_ids))

    def close(self) -> None:
        if holder := self._holder():
            self.holders.remove(holder)
            self.events["closed uncommitted"] += holder.lease.committed_tokens < holder.lease.num_tokens
            holder.lease.close()
            if self.random.random() < 0.3:
                before = self._counts()
                holder.lease.close()
                with pytest.raises(LeaseClosed):
                    holder.lease.commit(holder.lease.num_tokens)
                assert self._counts() == before

    def evict(self) -> None:
        num_blocks, num_segments = self.random.randint(1, 5), self.cache.num_segments
        num_evictable, num_free = self.cache.num_evictable_blocks, self.cache.pool.num_free
        num_expected = min(num_blocks, num_evictable)
        assert self.cache.evict(num_blocks) == num_expected
        assert self.cache.pool.num_free == num_free + num_expected
        self.events["leaves truncated"] += num_expected > 0 and self.cache.num_segments == num_segments

    def misuse(self) -> None:
        before = self._counts()
        with pytest.raises(LeaseClosed):
            self.cache.commit(self.foreign, 1)
        with pytest.raises(LeaseClosed):
            self.cache.close(self.foreign)
        with pytest.raises(InvalidRequest):
            self.cache.lease(NAMESPACES[0], self.random.choice((b"", b"\0", b"\0\0\0\0\0")))
        if holder := self._holder():
            with pytest.raises(InvalidRequest):
                holder.lease.commit(self.random.choice((-1, holder.lease.num_tokens + 1)))
        assert self._counts() == before

    # -- dice ------------------------------------------------------------------------------------------------------

    def _holder(self) -> Holder | None:
        return self.random.choice(self.holders) if self.holders else None

    def _namespace(self) -> Namespace:
        return self.random.choice(NAMESPACES[: self.world.num_namespaces])

    def _prompt(self) -> bytes:
        """Often the beginning of an earlier prompt, with something random after it."""
        old = self.random.choice(self.prompts)
        kept = old[: self.random.choice((len(old), self.random.randint(0, len(old))))]
        room = self.world.max_tokens - len(kept)
        num_fresh = self.random.choice((self.random.randint(0, room), self.random.randint(0, min(room, 2))))
        fresh = [self.random.randrange(self.world.alphabet) for _ in range(num_fresh)]
        prompt = (*kept, *fresh) or (0,)
        if len(self.prompts) < 12:
            self.prompts.append(prompt)
        else:
            self.prompts[self.random.randrange(12)] = prompt
        return np.array(prompt, dtype="<u4").tobytes()

    def _counts(self) -> Counts:
        cache, pool = self.cache, self.cache.pool
        return Counts(
            pool.num_free, pool.num_leased, pool.num_published, cache.num_pinned_blocks, cache.num_evicted_blocks
        )

    def finish(self) -> None:
        """Close and evict everything: not a block may be missing."""
        for holder in self.holders:
            holder.lease.close()
        num_published = self.cache.pool.num_published
        assert self.cache.num_evictable_blocks == num_published
        assert self.cache.evict(self.world.num_blocks + 1) == num_published
        self.cache.check()
        assert self._counts()[:4] == (self.world.num_blocks, 0, 0, 0)
        assert self.cache.num_namespaces == 0


def walk(world: World, seed: int, steps: int, policy: str = "lru") -> Counter[str]:
    """Take one random walk and return what happened on it."""
    walker = Walk(world, seed, policy)
    for _ in range(steps):
        walker.step()
    walker.finish()
    return walker.events


@pytest.mark.parametrize("world", ROOMY, ids=lambda world: f"block_size={world.block_size}")
def test_a_cache_with_room_reuses_everything_ever_published(world: World) -> None:
    events = Counter[str]()
    for seed in range(10):
        events += walk(world, seed, steps=100)
    assert events["out of blocks"] == events["evicted blocks"] == 0
    assert events["splits"] > 0
    assert events["leaves attached"] > 0
    assert events["leaves grown"] > 0
    assert events["blocks adopted"] > 0
    assert (events["copies"] > 0) == (world.block_size > 1)


@pytest.mark.parametrize("world", TIGHT, ids=lambda world: f"block_size={world.block_size},blocks={world.num_blocks}")
def test_a_cache_without_room_reuses_everything_not_evicted(world: World) -> None:
    events = walk(world, seed=world.block_size, steps=4000)
    rare = {"copies", "tail blocks replaced", "shared blocks given up"} if world.block_size > 1 else set()
    common = {
        "splits",
        "leaves attached",
        "leaves grown",
        "leaves truncated",
        "blocks adopted",
        "closed uncommitted",
        "evicted blocks",
        "explained as EVICTED",
        "out of blocks",
    }
    assert {event for event in common | rare if not events[event]} == set()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_frees_the_right_blocks(policy: str) -> None:
    events = Counter[str]()
    for world in TIGHT:
        events += walk(world, seed=1, steps=500, policy=policy)
    assert min(events["evicted blocks"], events["splits"], events["leaves truncated"]) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Take random walks over the cache until one fails.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    events, taken, seed, start_s = Counter[str](), 0, options.seed, time.perf_counter()
    while taken < options.steps:
        for world in (*ROOMY, *TIGHT):
            steps = 100 if world in ROOMY else 1000
            policy = EVICTION_POLICIES[seed % len(EVICTION_POLICIES)]
            try:
                events += walk(world, seed, steps, policy)
            except BaseException:
                print(f"failed: walk({world}, seed={seed}, steps={steps}, policy={policy!r})")
                raise
            taken += steps
        seed += 1
    elapsed_s = time.perf_counter() - start_s
    print(f"{taken} steps in {elapsed_s:.0f} s, {taken / elapsed_s:.0f} steps/s: {dict(sorted(events.items()))}")


if __name__ == "__main__":
    main()
