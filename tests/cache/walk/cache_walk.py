"""Random walks over the cache. An oracle checks every step, and a failing walk is shortened.

python -m tests.cache.walk.cache_walk --steps 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY, Grant, Retention
from radixkv.api.statement import DAY_S
from radixkv.cache.held_blocks import HeldPath
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node, Session, path_to
from radixkv.cache.part_memory import PartMemory
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.public_prefixes import PublicPrefix
from radixkv.cache.purge import Purged, all_slices
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.tenants import Quota
from radixkv.cache.window_pool import Reach, WindowPool
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.config import EVICTION_POLICIES
from radixkv.errors import CapacityError, InvalidRequest, LeaseClosed, RadixKVError
from radixkv.namespace import PUBLIC_TENANT, Namespace, PromptKey
from radixkv.tokens import shared_bytes
from tests.cache.walk.oracle import STEP_TOKENS, Holder, Oracle
from tests.cache.walk.retention_oracle import RetentionRequest
from tests.cache.walk.use_oracle import UseOracle
from tests.events.event_oracle import WatchedCache
from tests.fakes import FakeClock

NAMESPACES = (
    Namespace("m"),
    Namespace("m", tenant="a"),
    Namespace("m", adapter="a"),
    Namespace("m", salt="a"),
    Namespace("m", adapter="b"),
    Namespace("m", adapter="a2"),
)


@dataclass(frozen=True)
class World:
    """The sizes of one walk. They are small, so that requests compete for blocks and share prefixes."""

    block_size: int
    num_blocks: int
    max_tokens: int  # of a prompt
    alphabet: int = 2  # number of distinct tokens
    num_namespaces: int = 2
    max_leases: int = 5
    evicts: bool = True
    probation_share: float = 1.0
    max_retained_blocks: int = 0
    quotas: tuple[tuple[str, Quota], ...] = ()
    default_quota: Quota = field(default_factory=Quota)
    parts: tuple[tuple[int, Reach], ...] = ()  # of each group of windowed layers: its number of parts, and its reach
    memory: PartMemory | None = None  # which parts share with blocks; None if they have pools of their own
    max_path_nodes: int = 512  # branches of a path with more nodes are evicted
    holds: bool = False  # whether leases are held after their requests
    public_texts: tuple[str, ...] = ()  # registered and unregistered as public prefixes; each digit is a token
    hints: bool = False  # whether clients drop, share and retain prompts, sessions and namespaces

    def quota_of(self, tenant: str) -> Quota:
        return dict(self.quotas).get(tenant, self.default_quota)


# Nothing is ever evicted.
ROOMY = [
    World(block_size=1, num_blocks=600, max_tokens=10, evicts=False),
    World(block_size=2, num_blocks=600, max_tokens=12, evicts=False),
    World(block_size=4, num_blocks=600, max_tokens=21, alphabet=3, evicts=False),
    World(block_size=16, num_blocks=600, max_tokens=70, num_namespaces=6, evicts=False),
]
# The pool is too small for all prompts.
TIGHT = [
    World(block_size=1, num_blocks=24, max_tokens=8, max_retained_blocks=7),
    World(block_size=2, num_blocks=20, max_tokens=13, max_retained_blocks=4, probation_share=0.3),
    World(block_size=4, num_blocks=24, max_tokens=30, alphabet=3, max_retained_blocks=24),
    World(block_size=4, num_blocks=9, max_tokens=28, num_namespaces=1, max_leases=3),
    World(block_size=16, num_blocks=16, max_tokens=70, num_namespaces=6, max_retained_blocks=5),
]
# Tenants with floors and ceilings share the pool.
WITH_QUOTAS = [
    World(
        block_size=2,
        num_blocks=24,
        max_tokens=26,
        max_retained_blocks=8,
        quotas=(("", Quota(floor_blocks=6, ceiling_blocks=14)), ("a", Quota(ceiling_blocks=11))),
    ),
    World(
        block_size=4,
        num_blocks=20,
        max_tokens=40,
        alphabet=3,
        num_namespaces=6,
        max_retained_blocks=6,
        quotas=(("a", Quota(floor_blocks=7)),),
        probation_share=0.2,
    ),
    World(
        block_size=2,
        num_blocks=24,
        max_tokens=20,
        num_namespaces=6,
        max_retained_blocks=5,
        quotas=(("a", Quota(floor_blocks=5)),),
        default_quota=Quota(ceiling_blocks=12),
        probation_share=0.5,
    ),
]
# Windowed layers have parts in pools of their own.
WITH_PARTS = [
    World(block_size=1, num_blocks=60, max_tokens=20, max_leases=3, parts=((27, Reach(3)),)),
    World(block_size=4, num_blocks=40, max_tokens=44, alphabet=3, max_leases=3, parts=((16, Reach(6)),)),
    World(
        block_size=2,
        num_blocks=40,
        max_tokens=30,
        max_leases=4,
        max_retained_blocks=8,
        parts=((26, Reach(5)), (24, Reach(2))),
        quotas=(("a", Quota(floor_blocks=7)),),
    ),
    World(block_size=4, num_blocks=11, max_tokens=28, num_namespaces=1, max_leases=2, parts=((10, Reach(9)),)),
]
# The parts of windowed layers share one memory with the blocks.
WITH_SHARED_MEMORY = [
    World(
        block_size=1,
        num_blocks=60,
        max_tokens=20,
        max_leases=3,
        parts=((40, Reach(3)),),
        memory=PartMemory(part_bytes=5, block_bytes=2, num_dedicated_parts=18),
        max_retained_blocks=8,
    ),
    World(
        block_size=4,
        num_blocks=40,
        max_tokens=44,
        alphabet=3,
        max_leases=4,
        parts=((30, Reach(6)),),
        memory=PartMemory(part_bytes=1, block_bytes=1, num_dedicated_parts=9),
        quotas=(("a", Quota(floor_blocks=7)),),
        probation_share=0.5,
    ),
    World(
        block_size=2,
        num_blocks=30,
        max_tokens=26,
        max_leases=3,
        parts=((26, Reach(5)),),
        memory=PartMemory(part_bytes=1, block_bytes=0, num_dedicated_parts=26),
        default_quota=Quota(ceiling_blocks=20),
    ),
    World(
        block_size=2,
        num_blocks=36,
        max_tokens=30,
        max_leases=3,
        parts=((26, Reach(5)), (24, Reach(2))),
        memory=PartMemory(part_bytes=1, block_bytes=3, num_dedicated_parts=14),
        holds=True,
    ),
]
# Paths soon have too many nodes.
DEEP = [
    World(block_size=1, num_blocks=40, max_tokens=14, max_retained_blocks=6, max_path_nodes=2, holds=True),
    World(block_size=4, num_blocks=30, max_tokens=36, num_namespaces=1, max_path_nodes=2, holds=True),
]
# Texts become public prefixes, and private again.
PUBLIC = [
    World(block_size=1, num_blocks=16, max_tokens=13, max_leases=3, public_texts=("0100", "1101", "11011")),
    World(block_size=4, num_blocks=12, max_tokens=44, max_leases=2, public_texts=("010011" * 3, "01001110")),
    World(block_size=2, num_blocks=16, max_tokens=26, max_leases=3, holds=True, public_texts=("010011", "1" * 9)),
    World(block_size=16, num_blocks=10, max_tokens=144, num_namespaces=1, max_leases=2, public_texts=("01" * 32,)),
    World(
        block_size=2,
        num_blocks=30,
        max_tokens=40,
        public_texts=("0100110", "010001", "110"),
        quotas=(
            ("", Quota(floor_blocks=6, ceiling_blocks=16)),
            ("a", Quota(ceiling_blocks=11)),
            (PUBLIC_TENANT, Quota(floor_blocks=3)),
        ),
    ),
    World(
        block_size=2,
        num_blocks=40,
        max_tokens=30,
        max_leases=4,
        parts=((40, Reach(5)), (38, Reach(2))),
        public_texts=("0100110", "1100"),
    ),
]
# Clients also send hints.
HINTED = [replace(world, hints=True) for world in (*WITH_QUOTAS, TIGHT[1], WITH_SHARED_MEMORY[3], PUBLIC[2])]
WORLDS = (*ROOMY, *TIGHT, *WITH_QUOTAS, *WITH_PARTS, *WITH_SHARED_MEMORY, *DEEP, *PUBLIC, *HINTED)
EVENT_BLOCK_SIZES = {1: 2, 2: 1, 4: 6, 16: 4}  # tokens per block in events, by block size of the cache


class Counts(NamedTuple):
    """Numbers of blocks that a refused call must not change."""

    num_free: int
    num_leased: int
    num_published: int
    num_pinned: int
    num_evicted: int


class Place(NamedTuple):
    """Where a prompt can be leased.

    Attributes:
        namespace: of the tree in which it would be published.
        cached_tokens: tokens that could be reused.
        root_tokens: tokens of the public prefix above the tree.
        are_pinned: of each block of the reused tokens, whether it is already kept from eviction.
    """

    namespace: Namespace
    cached_tokens: int
    root_tokens: int
    are_pinned: list[bool]

    def num_needed_blocks(self, cached_tokens: int, num_blocks: int, block_size: int) -> int:
        """Count the blocks that a lease allocates or newly pins if it reuses `cached_tokens` tokens."""
        num_allocated = num_blocks - cached_tokens // block_size
        return num_allocated + self.are_pinned[: -(-cached_tokens // block_size)].count(False)


class Walk:
    """One cache, its oracle and the holders of leases. Counts the events."""

    def __init__(self, world: World, policy: str) -> None:
        self.world = world
        self.random = random.Random()
        # A generator of its own, so that everything else is the same with and without sessions.
        self.session_random = random.Random()
        self.clock = FakeClock()
        self.parts = WindowedLayers(
            [
                WindowPool(world.num_blocks, number, world.block_size, reach, STEP_TOKENS, world.memory)
                for number, reach in world.parts
            ]
        )
        self.ledger = TenantLedger(
            world.block_size, dict(world.quotas), clock=self.clock, unix_time=lambda: DAY_S - 20.0
        )
        self.use_oracle = UseOracle(self.ledger, world.block_size)
        self.watch = WatchedCache(EVENT_BLOCK_SIZES[world.block_size], world.block_size, max_step_blocks=40)
        self.cache = PrefixCache(
            world.num_blocks,
            world.block_size,
            policy=make_policy(policy, world.num_blocks),
            quotas=dict(world.quotas),
            default_quota=world.default_quota,
            max_retained_blocks=world.max_retained_blocks,
            probation_share=world.probation_share,
            clock=self.clock,
            max_evicted_prefixes=16,
            listeners=[self.watch.feed],
            windows=self.parts,
            max_public_blocks=world.num_blocks // 2,
            ledger=self.ledger,
        )
        self.watch.feed.switch_on(self.cache.nodes)
        self.oracle = Oracle(world.num_blocks, world.block_size, world.max_retained_blocks, self.parts)
        self.texts = [np.array([*map(int, text)], dtype="<u4").tobytes() for text in world.public_texts]
        self.oracle.public_texts = tuple(self.texts)
        self.public: dict[bytes, PublicPrefix] = {}  # the present public prefixes, by text
        self.holders: list[Holder] = []
        self.closed_lease = self.cache.lease(NAMESPACES[0], b"\1\0\0\0")
        self.closed_lease.close()
        self.prompts: list[tuple[int, ...]] = [()]  # some earlier prompts, from which new ones are made
        self.num_dropped_blocks = 0  # dropped in the last step, but not counted as evicted
        # The sessions that published each whole block, by the number of the prefix that the block ends.
        self.publishers: dict[int, set[Session | None]] = {}
        self.events: Counter[str] = Counter()
        self.action_weights: dict[Callable[[], None], float] = {
            self.match: 4,
            self.lease: 8,
            self.write: 4,
            self.commit: 10,
            self.extend: 4,
            self.close: 6,
            self.hold: world.holds,
            self.evict: world.evicts,
            self.retain: 2 * world.evicts * (not self.texts),
            self.publish_text: 3 * bool(self.texts),
            self.purge: 0.1 * world.evicts,
            self.drain: 0.1 * world.evicts,
            self.misuse: 1,
            self.publish_events: 10,
        }

        self.hint_actions: list[Callable[[], None]] = [
            self.drop,
            self.drop_session,
            self.drop_session,
            self.drop_namespaces,
            self.share,
            self.share_session,
            self.set_awaits,
        ]
        if not self.texts:
            self.hint_actions.append(self.retain_namespaces)

    def step(self, dice: int) -> None:
        """Perform one random operation, and compare the cache with the oracles."""
        self.random.seed(dice)
        self.session_random.seed(dice)
        self.clock.now_s += self.random.choice((0, 0, 1))
        self.events["blocks expired"] += self.oracle.retention.expire(self.clock.now_s)
        num_evicted_before, self.num_dropped_blocks = self.cache.num_evicted_blocks, 0
        if self.world.hints and self.session_random.random() < 0.2:
            self.session_random.choice(self.hint_actions)()
        else:
            (act,) = self.random.choices(list(self.action_weights), list(self.action_weights.values()))
            act()
        if self.session_random.random() < 0.03:
            self.end_session()
        num_removed_blocks = self.cache.num_evicted_blocks - num_evicted_before + self.num_dropped_blocks
        if num_removed_blocks:
            num_lost_tokens = self.oracle.forget_evicted(self.cache)
            assert num_removed_blocks <= num_lost_tokens <= num_removed_blocks * self.world.block_size
            self.events["evicted blocks"] += num_removed_blocks
        self.cache.check()
        self.use_oracle.verify(self.cache, self.clock.now_s)
        assert self.cache.num_retained_blocks == len(self.oracle.retention.retained())
        for tree in self.cache._trees.values():
            self.oracle.verify_priorities(tree)
        self.oracle.poison_free_blocks(self.cache)
        self._verify_sessions()
        for tenant, usage in self.cache.tenants.items():
            ceiling_blocks = self.world.quota_of(tenant).ceiling_blocks
            assert usage.num_cached_blocks + usage.num_leased_blocks <= (ceiling_blocks or math.inf)
        for holder in self.holders:
            holder.verify()
            if not holder.is_revoked:
                num_published = self.oracle.num_published(holder.identities)
                assert max(num_published, holder.lease.public_tokens) >= holder.num_kept_tokens

    def match(self) -> None:
        namespace, tokens = self._choose_namespace(), self._make_prompt()
        match = self.cache.match(namespace, tokens)
        identities = self.oracle.identities(namespace, tokens)
        num_reusable = self.oracle.num_reusable(identities)
        places = self._places(namespace, tokens)
        assert match.cached_tokens == places[0].cached_tokens
        self.oracle.verify_match(match, self.oracle.contents(namespace, tokens))

        # The reason of the miss, as if another adapter had been loaded under the same name before.
        former = namespace._replace(adapter="b" if namespace.adapter == "a" else "a")
        former_keys = [PromptKey(former, tokens)] if namespace.adapter else []
        reason = self.cache.explain(namespace, tokens, match.cached_tokens, former_keys)
        if namespace.adapter and reason is not MissReason.NONE:
            former_identities = self.oracle.identities(former, tokens)
            if reason is MissReason.ADAPTER_CHANGED:
                assert self.oracle.was_published(int(former_identities[match.cached_tokens]))
            elif self.oracle.num_reusable(former_identities) > match.cached_tokens:
                assert reason in (MissReason.EVICTED, MissReason.EXPIRED)
        block_end = (match.cached_tokens // self.world.block_size + 1) * self.world.block_size
        assert (reason is MissReason.NONE) == (match.cached_tokens == identities.size - 1)
        if match.cached_tokens < num_reusable:
            assert reason is MissReason.NO_WINDOW
            self.events["matches cut short"] += 1
        elif reason in (MissReason.EVICTED, MissReason.EXPIRED):
            ends = [self.oracle.identities(place.namespace, tokens)[:block_end][-1] for place in places]
            assert any(self.oracle.was_published(int(end)) for end in ends)
        self.events[f"explained as {reason.value}"] += 1

    def lease(self) -> None:
        if len(self.holders) == self.world.max_leases:
            self.close()
            return
        namespace, tokens, read = self._choose_namespace(), self._make_prompt(), self.random.random() < 0.85
        num_blocks = -(-len(tokens) // (4 * self.world.block_size))
        places = self._places(namespace, tokens) if read else [Place(namespace, 0, 0, [])]
        num_expected_tokens = 2 * self.world.max_tokens + self.world.block_size if self.parts.pools else 0
        max_tokens = max(num_expected_tokens, len(tokens) // 4)
        num_reserved_blocks = self._num_reserved_blocks(max_tokens) - self._num_reserved_blocks()
        num_takeable = self._num_takeable(namespace.tenant) - num_reserved_blocks
        # The lease is opened at the first place where there is room for it.
        place, num_reused = places[0], None
        for candidate in places:
            num_reusable = self._num_reused(candidate, tokens, num_blocks, num_takeable)
            if num_reusable is not None:
                place, num_reused = candidate, num_reusable
                break
        before, floors = self._counts(), self._floors(namespace.tenant)
        try:
            session_id = self.session_random.choice(("", "s", "t", "u"))
            is_prefetch = self.session_random.random() < 0.2
            prior_use_s = self.session_random.choice((None, 0.0)) if is_prefetch else None
            lease = self.cache.lease(
                namespace,
                tokens,
                read=read,
                num_expected_tokens=num_expected_tokens,
                is_prefetch=is_prefetch,
                prior_use_s=prior_use_s,
                session_id=session_id,
            )
            self.events["loaded ahead"] += prior_use_s is not None
        except CapacityError as error:
            is_for_parts = "parts of" in str(error)
            assert is_for_parts or num_reused is None, f"there is room at {place}"
            if not self.holders:
                assert not is_for_parts, "one request always has the parts that it may need"
                num_root_blocks = max(place.root_tokens for place in places) // self.world.block_size
                assert num_blocks - num_root_blocks > self._max_blocks(namespace.tenant), "it fits when nothing runs"
                self.events["refused although nothing runs"] += 1
            assert self._counts() == before
            self.events["refused for its parts"] += is_for_parts
            self.events[type(error).__name__] += 1
            return
        self._verify_floors(floors)
        assert (lease.cached_tokens, len(lease.root_prefix.tokens) // 4) == (num_reused, place.root_tokens)
        if lease.cached_tokens != place.cached_tokens:
            # The block that is shared in part is not reused, since the lease needs its memory: no other block is left.
            self.events["less within reach"] += place.cached_tokens - lease.cached_tokens > self.world.block_size
            assert self._num_takeable(namespace.tenant) == num_reserved_blocks
            self.events["shared blocks not reused"] += 1
        self.events["leased where there is room"] += place is not places[0]
        self.events["public tokens"] += lease.public_tokens
        num_new_blocks = lease.block_ids.size - lease.cached_tokens // self.world.block_size
        num_evicted = self.cache.num_evicted_blocks - before.num_evicted
        num_missing = num_new_blocks - before.num_free
        is_exact = num_evicted == max(0, num_missing) or (self.world.quotas and num_evicted > num_missing)
        assert is_exact or self.world.memory is not None, (
            "only parts that share memory with blocks change the number of evictions"
        )
        holder = self._receive(lease)
        self.holders.append(holder)
        self.events["copies"] += lease.copy is not None

    def _receive(self, lease: Lease) -> Holder:
        """Make the holder of a new lease, after a check of the reused blocks."""
        tokens = bytes(lease.tokens)
        identities = self.oracle.identities(lease.namespace, tokens)
        holder = Holder(self.oracle, lease, identities, self.oracle.contents(lease.namespace, tokens))
        holder.receive()
        return holder

    def publish_text(self) -> None:
        """Make a text public, or private again if it is public."""
        text = self.random.choice(self.texts)
        prefix = self.public.pop(text, None)
        if prefix is not None:
            self.cache.public.unregister(prefix.name)
            self.events["texts no longer public"] += 1
            return
        try:
            prefix = self.cache.public.register(text.hex(), "m", "", text)
        except CapacityError:
            self.events["texts refused"] += 1
            return
        try:
            with self.cache.lease(prefix.namespace, text) as lease:
                holder = self._receive(lease)
                holder.write(lease.num_tokens)
                lease.commit(lease.num_tokens)
            self.cache.public.activate(prefix)
        except CapacityError:
            self.cache.public.abandon(prefix)
            self.events["texts refused"] += 1
            return
        self.public[text] = prefix
        self.events["texts made public"] += 1

    def write(self) -> None:
        holder = self._choose_writer()
        if holder is not None:
            holder.write(self.random.randint(holder.num_written, holder.lease.num_tokens))

    def commit(self) -> None:
        holder = self._choose_writer()
        if holder is None:
            return
        if self.random.random() < 0.7:
            holder.write(holder.lease.num_tokens)
        lease, block_size = holder.lease, self.world.block_size
        upto = self.random.choice((holder.num_written, self.random.randint(0, holder.num_written)))
        # Only whole blocks and the end of the prompt are published.
        publishable_upto = upto if upto == lease.num_tokens else upto // block_size * block_size
        end = max(publishable_upto, lease.committed_tokens)
        publishes = end > lease.committed_tokens
        if publishes:
            holder.make_copy()  # which must be done before a commit
        if holder.is_revoked:
            counts = self._counts()
            assert lease.commit(upto) == 0
            assert self._counts() == counts
            self.events["commits after a purge"] += 1
            return
        num_already_published = max(self.oracle.num_published(holder.identities), lease.committed_tokens)
        expected = max(0, end - num_already_published)
        num_segments, num_published = len(self.cache.segments), self.cache.pool.num_published
        block_ids = lease.block_ids.copy()

        assert lease.commit(upto) == expected

        assert lease.committed_tokens == end
        if end > lease.public_tokens:
            self.oracle.publish(lease.namespace, bytes(lease.tokens[: end * 4]), holder.identities[:end])
            for identity in holder.identities[block_size - 1 : end * publishes : block_size].tolist():
                self.publishers.setdefault(identity, set()).add(lease.session)
        num_new_segments = len(self.cache.segments) - num_segments
        self.events["splits"] += num_new_segments == 2
        self.events["leaves attached"] += num_new_segments == 1
        has_leaf_grown = num_new_segments == 0 and expected > 0
        self.events["leaves grown"] += has_leaf_grown
        self.events["tail blocks replaced"] += has_leaf_grown and self.cache.pool.num_published == num_published
        self.events["blocks adopted"] += int(np.count_nonzero(block_ids != lease.block_ids))

    def extend(self) -> None:
        holder = self._choose_writer()
        if holder is None or holder.lease.num_tokens >= 2 * self.world.max_tokens:
            return
        lease, block_size = holder.lease, self.world.block_size
        tokens = np.array(
            [self.random.randrange(self.world.alphabet) for _ in range(self.random.randint(1, block_size + 1))],
            dtype="<u4",
        ).tobytes()
        is_published = lease.committed_tokens == lease.num_tokens
        continues_in_a_copy = lease.num_tokens % block_size > 0 and lease.num_published_blocks == lease.block_ids.size
        assert is_published or not continues_in_a_copy
        num_blocks_after = -(-(lease.num_tokens + len(tokens) // 4) // block_size)
        num_new_blocks = num_blocks_after - lease.block_ids.size + continues_in_a_copy
        before, num_takeable = self._counts(), self._num_takeable(lease.namespace.tenant)
        floors = self._floors(lease.namespace.tenant)
        try:
            assert holder.extend(tokens) == num_new_blocks <= num_takeable
        except CapacityError:
            assert num_new_blocks > num_takeable
            assert self._counts() == before
            self.events["extensions refused"] += 1
            return
        self._verify_floors(floors)
        assert (lease.copy is not None) >= continues_in_a_copy
        self.events["extensions"] += 1
        self.events["extensions in a copy"] += continues_in_a_copy

    def close(self) -> None:
        if self.holders:
            holder = self.random.choice(self.holders)
            self.holders.remove(holder)
            self.events["closed uncommitted"] += holder.lease.committed_tokens < holder.lease.num_tokens
            num_evicted_blocks = self.cache.num_evicted_blocks
            holder.lease.awaits = self.random.choice(list(Awaits))
            holder.lease.close()
            self.events["blocks thinned"] += self.cache.num_evicted_blocks - num_evicted_blocks
            is_long = holder.lease.num_nodes > self.world.max_path_nodes
            self.events["long paths closed after a purge"] += is_long and holder.is_revoked
            if self.random.random() < 0.3:
                before = self._counts()
                holder.lease.close()
                with pytest.raises(LeaseClosed):
                    holder.lease.commit(holder.lease.num_tokens)
                assert self._counts() == before

    def hold(self) -> None:
        held, holder = self.cache.held, self._choose_writer()
        if (
            holder is not None
            and held.num_blocks + held.num_blocks_to_add([HeldPath.of(holder.lease)]) <= held.max_blocks
        ):
            holder.hold()
            self.events["leases held"] += 1

    def evict(self) -> None:
        num_blocks, num_segments = self.random.randint(1, 5), len(self.cache.segments)
        tenant = self.random.choice((None, "", "a"))
        num_unowned, floors, leaves_before = self._num_unowned(), self._floors(tenant), self._leaves()
        num_expected = min(num_blocks, self.cache.num_evictable_blocks - self._num_kept_from(tenant))
        assert self.cache.evict(num_blocks, tenant=tenant) == num_expected
        assert self._num_unowned() == num_unowned + num_expected
        self._verify_floors(floors)
        self.events["leaves truncated"] += num_expected > 0 and len(self.cache.segments) == num_segments
        if not self.world.quotas:
            leaves = self._leaves()
            max_shrunk_priority, min_whole_priority = 0, 100
            for leaf, (priority, num_blocks_before) in leaves_before.items():
                _, num_blocks_left = leaves.get(leaf, (priority, 0))
                if num_blocks_left < num_blocks_before:
                    max_shrunk_priority = max(max_shrunk_priority, priority)
                elif num_blocks_left == num_blocks_before:
                    min_whole_priority = min(min_whole_priority, priority)
            assert max_shrunk_priority <= min_whole_priority, "a leaf was evicted before one of lower priority"

    def retain(self) -> None:
        runs = self.oracle.runs()
        if not runs:
            return
        namespace, tokens = self.random.choice(runs)
        identities, now_s = self.oracle.identities(namespace, tokens).tolist(), self.clock.now_s
        # A range ends with a block, since siblings could share an end inside a block.
        block_ends = [*range(self.world.block_size, len(identities), self.world.block_size), len(identities)]
        end = self.random.choice(block_ends)
        start, ttl_s = self.random.randrange(end), self.random.choice((None, 1.0, 7.0))
        priority = self.random.choice((0, 20, 50, 51, 80, 80, 100))
        only_raise = self.random.random() < 0.5
        request = RetentionRequest(start, end, priority, math.inf if ttl_s is None else now_s + ttl_s, only_raise)
        expected = self.oracle.retention.retain(identities, request)
        before = self._counts()
        grant = self.cache.retain(namespace, tokens, Retention(priority, ttl_s, start, end), only_raise=only_raise)
        assert grant[:3] == expected[:3], f"{request}: expected {expected}, got {grant}"
        assert self._counts() == before
        self.events["retained tokens"] += grant.granted_tokens
        self.events["refused tokens"] += grant.refused_tokens

    def purge(self) -> None:
        tenant, adapter, salt = (self.random.choice((None, "", "a")) for _ in range(3))
        self._forget(tenant, adapter, salt, lambda: self.cache.purge(tenant=tenant, adapter=adapter, salt=salt))

    def drain(self) -> None:
        adapter = self.random.choice("ab")
        self._forget(None, adapter, None, lambda: all_slices(self.cache.purge_adapter_in_slices(adapter)))
        self.events["adapters drained"] += 1

    def _forget(self, tenant: str | None, adapter: str | None, salt: str | None, forget: Callable[[], Purged]) -> None:
        """Purge namespaces with `forget`, and check that these and no others were purged."""

        def is_gone(namespace: Namespace) -> bool:
            pairs = ((tenant, namespace.tenant), (adapter, namespace.adapter), (salt, namespace.salt))
            is_named = all(wanted is None or wanted == name for wanted, name in pairs)
            return is_named and namespace.tenant != PUBLIC_TENANT

        num_unowned, num_published = self._num_unowned(), self.cache.pool.num_published
        purged = forget()
        assert self._num_unowned() == num_unowned + purged.freed_blocks
        assert self.cache.pool.num_published == num_published - purged.freed_blocks - purged.pinned_blocks
        assert not any(is_gone(namespace) for namespace in self.cache._trees)
        self.oracle.forget(is_gone)
        for holder in self.holders:
            holder.is_revoked = holder.is_revoked or is_gone(holder.lease.namespace)
        self.events["blocks purged"] += purged.freed_blocks
        self.events["blocks purged while in use"] += purged.pinned_blocks

    def end_session(self) -> None:
        sessions = list(self.cache.sessions)
        if sessions:
            session = self.session_random.choice(sessions)
            nodes = set(session.nodes)
            num_blocks = sum(node.num_blocks for node in nodes)
            assert self.cache.end_session(session.tenant, session.session_id) == num_blocks
            assert self.cache.end_session(session.tenant, session.session_id) is None
            assert all(node.session is None and node.awaits is Awaits.NOTHING for node in nodes)
            self.events["nodes of ended sessions"] += len(nodes)

    def drop(self) -> None:
        """Drop the end of a prompt, and everything that continues it."""
        runs = self.oracle.runs()
        if not runs:
            return
        namespace, tokens = self.session_random.choice(runs)
        evicts, start = self.session_random.random() < 0.5, self.session_random.randrange(len(tokens) // 4)
        blocks_of_others = self._blocks_of_others(namespace.tenant)
        before = self._counts()
        plain = namespace._replace(public_prefix="")
        num_dropped, num_left = self.cache.drop(plain, tokens, start, evicts=evicts)
        self._verify_dropped(before, num_dropped // self.world.block_size, evicts=evicts)
        assert self._blocks_of_others(namespace.tenant) == blocks_of_others
        assert self.cache.num_pinned_blocks == before.num_pinned
        if num_dropped and not num_left and not self.texts:  # public prefixes are not dropped
            assert self.cache.match(plain, tokens).cached_tokens <= start + self.world.block_size - 1
        self.events["dropped"] += num_dropped

    def drop_session(self) -> None:
        sessions = [session for session in self.cache.sessions if session.nodes]
        if sessions:
            session = self.session_random.choice(sessions)
            evicts = self.session_random.random() < 0.5
            before, blocks_of_others = self._counts(), self._blocks_of_others(session.tenant)
            num_own_blocks = session.num_blocks
            num_dropped = self.cache.drop_session(session, evicts=evicts)
            self._verify_dropped(before, num_dropped, evicts=evicts)
            assert self._blocks_of_others(session.tenant) == blocks_of_others
            assert session.num_blocks == num_own_blocks - num_dropped
            self.events["dropped of sessions"] += num_dropped

    def drop_namespaces(self) -> None:
        """Drop all blocks of some namespaces of a tenant that no lease uses."""
        tenant, adapter, salt = self._choose_names()
        nodes = [node for node in self.cache.nodes() if node.owner.namespace.is_among(tenant, adapter, salt)]
        num_unused = sum(node.num_blocks for node in nodes if not node.ref_count)
        evicts = self.session_random.random() < 0.5
        before, blocks_of_others = self._counts(), self._blocks_of_others(tenant)
        dropped = all_slices(self.cache.drop_in_slices(tenant, adapter=adapter, salt=salt, evicts=evicts))
        assert dropped == (num_unused * self.world.block_size, any(node.ref_count for node in nodes))
        self._verify_dropped(before, num_unused, evicts=evicts)
        assert self._blocks_of_others(tenant) == blocks_of_others
        assert self.cache.num_pinned_blocks == before.num_pinned
        self.events["dropped of namespaces"] += num_unused

    def retain_namespaces(self) -> None:
        """Give all cached tokens of some namespaces of a tenant a priority."""
        tenant, adapter, salt = self._choose_names()
        priority, ttl_s = self.session_random.choice((0, 50, 80)), self.session_random.choice((None, 7.0))
        expires_s = math.inf if ttl_s is None else self.clock.now_s + ttl_s
        expected = Grant(0, 0, 0)
        for node in [node for nodes in self.cache.segments.slices() for node in nodes]:
            if not node.owner.namespace.is_among(tenant, adapter, salt):
                continue
            start, num_tokens = node.start_bytes // 4, len(node.tokens) // 4
            if expected.refused_tokens:  # after the first refusal, all tokens are refused
                expected = expected.joined(Grant(0, num_tokens, 0))
                continue
            tokens = self.cache._trees[node.owner.namespace].path_tokens(node)
            identities = self.oracle.identities(node.owner.namespace, tokens).tolist()
            request = RetentionRequest(start, start + num_tokens, priority, expires_s, only_raise=False)
            expected = expected.joined(self.oracle.retention.retain(identities, request))
        before = self._counts()
        grant = all_slices(self.cache.retain_in_slices(tenant, Retention(priority, ttl_s), adapter=adapter, salt=salt))
        assert grant[:3] == expected[:3], f"expected {expected}, got {grant}"
        assert self._counts() == before
        self.events["retained of namespaces"] += grant.granted_tokens

    def _choose_names(self) -> tuple[str, str | None, str | None]:
        """Return a tenant, and an adapter and a salt that may be None for all."""
        choose = self.session_random.choice
        return choose(("", "a")), choose((None, "", "a")), choose((None, "", "a"))

    def share(self) -> None:
        """Share the beginning of a prompt."""
        runs = self.oracle.runs()
        if not runs:
            return
        namespace, tokens = self.session_random.choice(runs)
        shared = tokens[: 4 * self.session_random.randint(1, len(tokens) // 4)]
        plain, before = namespace._replace(public_prefix=""), self._counts()
        num_owned_before = {session: session.num_blocks for session in self.cache.sessions}
        num_shared = self.cache.share(plain, shared)
        assert self._counts() == before
        num_owned = {session: session.num_blocks for session in self.cache.sessions}
        for session, num_blocks in num_owned_before.items():
            assert session.tenant == plain.tenant or num_owned[session] == num_blocks
        match = self.cache._find(plain, shared)
        assert all(node.session is None for node in path_to(match.node))
        assert self.texts or num_shared >= match.cached_tokens  # a lease may copy more of a public prefix
        self.events["shared"] += sum(num_owned_before.values()) - sum(num_owned.values())

    def share_session(self) -> None:
        sessions = [session for session in self.cache.sessions if session.nodes]
        if sessions:
            session, before = self.session_random.choice(sessions), self._counts()
            num_tokens = sum(len(node.tokens) // 4 for node in session.nodes)
            assert self.cache.share_session(session) == num_tokens
            assert (session.num_blocks, self._counts()) == (0, before)
            self.events["shared of sessions"] += num_tokens

    def _verify_dropped(self, before: Counts, num_blocks: int, *, evicts: bool) -> None:
        assert self.cache.pool.num_published == before.num_published - num_blocks
        assert self.cache.num_evicted_blocks == before.num_evicted + num_blocks * evicts
        self.num_dropped_blocks += num_blocks * (not evicts)

    def set_awaits(self) -> None:
        runs = self.oracle.runs()
        if runs:
            namespace, tokens = self.session_random.choice(runs)
            before = self._counts()
            awaits = self.session_random.choice(list(Awaits))
            self.cache.set_awaits(namespace._replace(public_prefix=""), tokens, awaits)
            assert self._counts() == before

    def _blocks_of_others(self, tenant: str) -> dict[str, int]:
        return {other: usage.num_cached_blocks for other, usage in self.cache.tenants.items() if other != tenant}

    def _verify_sessions(self) -> None:
        """Check that no other session, and no lease without one, has published the blocks of a session's own nodes."""
        self.publishers = {
            identity: sessions for identity, sessions in self.publishers.items() if self.oracle.is_published(identity)
        }
        for session in self.cache.sessions:
            for node in session.nodes:
                tokens = self.cache._trees[node.owner.namespace].path_tokens(node)
                size, start = self.world.block_size, node.start_bytes // 4
                block_ends = self.oracle.identities(node.owner.namespace, tokens)[start + size - 1 :: size].tolist()
                assert all(self.publishers.get(identity, set()) <= {session} for identity in block_ends)
                self.events["nodes of one session"] += 1

    def misuse(self) -> None:
        before = self._counts()
        with pytest.raises(LeaseClosed):
            self.closed_lease.commit(1)
        with pytest.raises(InvalidRequest):
            self.cache.lease(NAMESPACES[0], self.random.choice((b"", b"\0", b"\0\0\0\0\0")))
        holder = self._choose_writer()
        if holder is not None:
            with pytest.raises(InvalidRequest):
                holder.lease.commit(self.random.choice((-1, holder.lease.num_tokens + 1)))
        assert self._counts() == before

    def publish_events(self) -> None:
        """Publish the events of the cache, and compare what a reader of them knows with the cache."""
        self.events["events compared"] += self.watch.verify(self.cache) >= 0

    def _choose_writer(self) -> Holder | None:
        """Choose a holder that may still write; None if there is none."""
        writers = [holder for holder in self.holders if holder.held_block_ids is None]
        return self.random.choice(writers) if writers else None

    def _choose_namespace(self) -> Namespace:
        return self.random.choice(NAMESPACES[: self.world.num_namespaces])

    def _make_prompt(self) -> bytes:
        """Make a prompt: the beginning or all of an earlier prompt or of a public text, and then random tokens."""
        earlier = self.random.choice(self.prompts)
        if self.texts and self.random.random() < 0.6:
            earlier = tuple(np.frombuffer(self.random.choice(self.texts), dtype="<u4").tolist())
        beginning = earlier[: self.random.choice((len(earlier), self.random.randint(0, len(earlier))))]
        max_more_tokens = self.world.max_tokens - len(beginning)
        num_more_tokens = self.random.choice(
            (self.random.randint(0, max_more_tokens), self.random.randint(0, min(max_more_tokens, 2)))
        )
        more_tokens = [self.random.randrange(self.world.alphabet) for _ in range(num_more_tokens)]
        prompt = (*beginning, *more_tokens) or (0,)
        if len(self.prompts) < 12:
            self.prompts.append(prompt)
        else:
            self.prompts[self.random.randrange(12)] = prompt
        return np.array(prompt, dtype="<u4").tobytes()

    def _places(self, namespace: Namespace, tokens: bytes) -> list[Place]:
        """List the places where a prompt can be leased, those with the most cached tokens of the prompt first."""
        oracle, size = self.oracle, self.world.block_size
        num_found = oracle.num_reusable(oracle.identities(namespace, tokens))
        num_cached = oracle.num_with_parts(self.cache, namespace, tokens, num_found)
        places = [Place(namespace, num_cached, 0, self._are_pinned(namespace, tokens))]
        if namespace.adapter or not self.world.quota_of(namespace.tenant).uses_public_prefixes:
            return places
        for text, prefix in self.public.items():
            num_shared = min(shared_bytes(text, tokens, 0) // 4, len(tokens) // 4 - 1)
            for start in range(size, num_shared + 1, size):
                # The tree of the tenant below the first `start` tokens of the public prefix.
                rooted = namespace._replace(public_prefix=f"{prefix.namespace.salt}:{start}")
                num_cached = start if num_shared - start >= size else num_shared
                are_pinned = [True] * -(-num_cached // size)
                if rooted in self.cache._trees:
                    num_found = oracle.num_reusable(oracle.identities(rooted, tokens))
                    num_found = oracle.num_with_parts(self.cache, rooted, tokens, num_found)
                    if num_found >= num_cached and num_found > start:
                        num_cached, are_pinned = num_found, self._are_pinned(rooted, tokens)
                places.append(Place(rooted, num_cached, start, are_pinned))
        return sorted(places, key=lambda place: (place.cached_tokens, place.root_tokens), reverse=True)

    def _are_pinned(self, namespace: Namespace, tokens: bytes) -> list[bool]:
        """Return of each block of a prompt that is cached in a tree whether it is kept from eviction."""
        tree = self.cache._trees.get(namespace)
        if tree is None:
            return []
        nodes = path_to(tree.match(tokens)[0])
        are_pinned = [node.ref_count > 0 for node in nodes for _ in range(node.num_blocks)]
        return [True] * (namespace.public_prefix_tokens // self.world.block_size) + are_pinned

    def _num_reused(self, place: Place, tokens: bytes, num_blocks: int, num_takeable: float) -> int | None:
        """Count the tokens that a lease must reuse at a place; None if there is no room for it."""
        size = self.world.block_size
        if place.num_needed_blocks(place.cached_tokens, num_blocks, size) <= num_takeable:
            return place.cached_tokens
        # If the block that is shared in part is not reused, it can be evicted.
        num_tokens = place.cached_tokens // size * size
        if num_tokens > place.root_tokens:
            num_with_parts = self.oracle.num_with_parts(self.cache, place.namespace, tokens, num_tokens)
            num_tokens = max(place.root_tokens, num_with_parts)
        return num_tokens if place.num_needed_blocks(num_tokens, num_blocks, size) <= num_takeable else None

    def _max_blocks(self, tenant: str) -> float:
        """Count the blocks that one lease of a tenant can have beyond public prefixes when nothing else runs."""
        ceiling = self.world.quota_of(tenant).ceiling_blocks
        num_blocks = self.world.num_blocks - self.cache.public.num_kept_blocks - self._num_kept_from(tenant)
        return min(num_blocks, math.inf if ceiling is None else ceiling)

    def _leaves(self) -> dict[Node, tuple[int, int]]:
        """Return priority and number of blocks of each leaf that may be evicted."""
        self.cache.check()  # which resets priorities that have expired
        nodes = (node for tree in self.cache._trees.values() for node in tree.nodes())
        leaves = (node for node in nodes if node.is_leaf and not node.ref_count)
        return {
            leaf: (min(leaf.priority, 0) if self._has_session_ended(leaf) else leaf.priority, leaf.num_blocks)
            for leaf in leaves
        }

    def _has_session_ended(self, leaf: Node) -> bool:
        """Return whether a leaf is evicted before all others, since its session has ended and it is not retained."""
        return leaf.awaits is Awaits.NOTHING and leaf.priority <= DEFAULT_PRIORITY

    def _num_kept_from(self, tenant: str | None) -> int:
        """Count the evictable blocks that floors of other tenants keep from a tenant."""
        num_kept = 0
        for other, quota in self.world.quotas:
            usage = self.cache.tenants[other]
            num_evictable = usage.num_cached_blocks - usage.num_pinned_blocks
            if other != tenant:
                num_above_floor = max(0, usage.num_cached_blocks - quota.floor_blocks)
                num_kept += max(0, num_evictable - num_above_floor)
        return num_kept

    def _num_takeable(self, tenant: str) -> float:
        """Count the blocks that a tenant could allocate or pin in addition to those that its leases have."""
        num_takeable = self.cache.pool.num_free + self.cache.num_evictable_blocks - self._num_kept_from(tenant)
        num_takeable += self._num_returnable()
        ceiling, usage = self.world.quota_of(tenant).ceiling_blocks, self.cache.tenants[tenant]
        num_in_use = usage.num_leased_blocks + usage.num_pinned_blocks
        return num_takeable if ceiling is None else min(num_takeable, ceiling - num_in_use)

    def _num_unowned(self) -> int:
        """Count the blocks that are free or whose memory parts have."""
        return self.cache.pool.num_free + self.cache.pool.num_withheld

    def _num_returnable(self) -> int:
        """Count the blocks whose memory is used by parts that no holder has reserved."""
        return self.cache.pool.num_withheld - self._num_reserved_blocks()

    def _num_reserved_blocks(self, num_tokens: int = 0) -> int:
        """Count the blocks whose memory is reserved for parts of all holders, and of one more with `num_tokens`."""
        memory, size, num_blocks = self.world.memory, self.world.block_size, 0
        for group, pool in enumerate(self.parts.pools):
            if memory is not None and memory.block_bytes:
                num_parts = sum(holder.lease.windows[group].num_reserved for holder in self.holders)
                num_parts += pool.reach.max_parts(num_tokens, size) if num_tokens else 0
                num_parts_of_step = -(-STEP_TOKENS // size)
                num_shared_parts = max(0, num_parts + num_parts_of_step - memory.num_dedicated_parts)
                num_blocks += -(-num_shared_parts * memory.part_bytes // memory.block_bytes)
        return num_blocks

    def _floors(self, tenant: str | None) -> dict[str, int]:
        """Return how many blocks each other tenant must still have cached after evictions for this tenant."""
        quotas = [(other, quota) for other, quota in self.world.quotas if other != tenant]
        return {other: min(quota.floor_blocks, self.cache.tenants[other].num_cached_blocks) for other, quota in quotas}

    def _verify_floors(self, floors: dict[str, int]) -> None:
        assert all(self.cache.tenants[other].num_cached_blocks >= floor for other, floor in floors.items())

    def _counts(self) -> Counts:
        cache, pool = self.cache, self.cache.pool
        return Counts(
            pool.num_free, pool.num_leased, pool.num_published, cache.num_pinned_blocks, cache.num_evicted_blocks
        )

    def finish(self) -> None:
        """Close all leases, evict everything, and assert that no block is missing."""
        for holder in self.holders:
            holder.lease.close()
        for prefix in self.public.values():
            self.cache.public.unregister(prefix.name)
        num_published = self.cache.pool.num_published
        assert self.cache.num_evictable_blocks == num_published
        assert sum(self.cache.evict(self.world.num_blocks + 1, tenant=tenant) for tenant in ("", "a")) == num_published
        self.cache.check()
        self.use_oracle.verify(self.cache, self.clock.now_s)
        counts = self._counts()
        assert counts.num_free == self.world.num_blocks
        assert counts.num_leased == counts.num_published == counts.num_pinned == 0
        assert self.cache.num_namespaces == 0
        while self.watch.verify(self.cache) < 0:  # not all events have been published yet
            pass
        assert not self.watch.reader.blocks


def dice_of(seed: int, steps: int) -> range:
    """Return one number for each step of a walk. Walks of different seeds have no number in common."""
    return range(seed * 1_000_000, seed * 1_000_000 + steps)


def walk(world: World, policy: str, dice: Iterable[int]) -> Counter[str]:
    """Take one random walk. Returns how often each event happened."""
    walker = Walk(world, policy)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("radixkv.cache.evictor.MAX_PATH_NODES", world.max_path_nodes)
        for number in dice:
            walker.step(number)
        walker.finish()
    return walker.events


def shortest_failing(is_failing: Callable[[list[int]], bool], dice: list[int]) -> list[int]:
    """Leave out steps as long as the walk still fails: halves first, then quarters, down to single steps.

    What a step does depends only on its number and on the state of the cache, so a walk can be repeated without it.

    Source: Zeller, Hildebrandt: "Simplifying and isolating failure-inducing input", 2002.
    """
    size = len(dice) // 2
    while size:
        start = 0
        while start < len(dice):
            fewer = dice[:start] + dice[start + size :]
            if is_failing(fewer):
                dice = fewer
            else:
                start += size
        size //= 2
    return dice


def failure_of(world: World, policy: str, dice: Iterable[int]) -> str:
    """Return the error that a walk fails with; empty if it passes."""
    try:
        walk(world, policy, dice)
    except (AssertionError, RadixKVError, LookupError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def report(world: World, policy: str, dice: list[int]) -> str:
    """Describe a shortened failing walk as code that can be pasted into a test."""
    shortest = shortest_failing(lambda fewer: bool(failure_of(world, policy, fewer)), dice)
    return f"walk({world}, {policy!r}, {shortest})\n  fails with {failure_of(world, policy, shortest)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Take random walks over the cache until one fails.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    events, taken, seed, start_s = Counter[str](), 0, options.seed, time.perf_counter()
    while taken < options.steps:
        for world in WORLDS:
            policy = EVICTION_POLICIES[seed % len(EVICTION_POLICIES)]
            dice = dice_of(seed, steps=100 if world in ROOMY else 1000)
            try:
                events += walk(world, policy, dice)
            except Exception:  # noqa: BLE001 - any failure is minimized and reported
                traceback.print_exc()
                print(report(world, policy, list(dice)))
                return 1
            taken += len(dice)
        seed += 1
    elapsed_s = time.perf_counter() - start_s
    print(f"{taken} steps in {elapsed_s:.0f} s, {taken / elapsed_s:.0f} steps/s: {dict(sorted(events.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
