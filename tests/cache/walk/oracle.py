"""A slow and obvious model of the cache, and a memory in which every slot's content is recognizable.

Every (namespace, prefix) gets a number of its own. The pretended K/V of a token is the number of the prefix that it
ends: as with real K/V, two slots hold the same content only if all tokens before agree. Free and unwritten slots hold
poison. So a block that was reused wrongly, published too early, freed while used or overwritten shows as a wrong
number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache.block_pool import BlockState
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.namespace import Namespace
from tests.cache.walk.retention_oracle import RetentionOracle

FREE = -1
UNWRITTEN = -2
STEP_TOKENS = 7  # that one request computes at most

Identities = npt.NDArray[np.int64]


class Oracle:
    """The prefixes that are published, and the content that each slot of the pool must have."""

    def __init__(
        self, num_blocks: int, block_size: int, max_retained_blocks: int = 0, parts: WindowedLayers | None = None
    ) -> None:
        self.block_size = block_size
        self.parts = WindowedLayers() if parts is None else parts
        self.part_content = [np.full((pool.num_parts, block_size), FREE, dtype=np.int64) for pool in self.parts.pools]
        self.retention = RetentionOracle(block_size, max_retained_blocks)
        self.content = np.full((num_blocks, block_size), FREE, dtype=np.int64)
        self.public_texts: tuple[bytes, ...] = ()
        self._identities: dict[tuple[object, int], int] = {}
        self._contents: dict[object, int] = {}
        self._handed_out: set[int] = set()
        self._published: set[int] = set()
        self._ever_published: set[int] = set()
        self._longest: dict[int, tuple[Namespace, bytes]] = {}  # published runs by their last identity

    def identities(self, namespace: Namespace, tokens: bytes) -> Identities:
        """Return the number of each prefix of a prompt."""
        numbers = []
        before: object = tuple(namespace)  # so that namespaces are not compared as in the cache
        for token in np.frombuffer(tokens, dtype="<u4").tolist():
            before = self._identities.setdefault((before, token), len(self._identities))
            numbers.append(before)
        return np.array(numbers, dtype=np.int64)

    def contents(self, namespace: Namespace, tokens: bytes) -> Identities:
        """Return the number that the K/V of each token must have, wherever the prompt is leased.

        Tokens with which a public text begins have the same K/V in all namespaces of their adapter. For all others this
        is the number of the prefix in its namespace.
        """
        plain = namespace._replace(public_prefix="")
        if not self.public_texts:
            return self.identities(plain, tokens)
        is_public = namespace.adapter == ""
        numbers = []
        before: object = tuple(plain)
        for end, token in enumerate(np.frombuffer(tokens, dtype="<u4").tolist(), 1):
            head = bytes(tokens[: 4 * end])
            is_public = is_public and any(text.startswith(head) for text in self.public_texts)
            key: object = ("public", head) if is_public else (before, token)
            before = self._contents.setdefault(key, len(self._contents))
            numbers.append(before)
        return np.array(numbers, dtype=np.int64)

    def num_published(self, identities: Identities) -> int:
        """Count the published tokens of a prompt."""
        return next(
            (i for i, number in enumerate(identities.tolist()) if number not in self._published), identities.size
        )

    def num_reusable(self, identities: Identities) -> int:
        """Count the tokens of a prompt that a match must find."""
        return min(self.num_published(identities), identities.size - 1)

    def num_with_parts(self, cache: PrefixCache, namespace: Namespace, tokens: bytes, num_tokens: int) -> int:
        """Count the tokens of a prompt, `num_tokens` of which are cached, that can be reused with their parts."""
        if not self.parts.pools or not num_tokens:
            return num_tokens
        blocks = np.frombuffer(cache._trees[namespace].match(tokens)[2], dtype=np.int32)
        contents = self.contents(namespace, tokens)
        return next(upto for upto in range(num_tokens, -1, -1) if self._has_parts(blocks, contents, upto))

    def _has_parts(self, blocks: npt.NDArray[np.int32], identities: Identities, upto: int) -> bool:
        """Whether each token within reach has a part. Those that there are hold the right content."""
        for pool, content in zip(self.parts.pools, self.part_content, strict=True):
            for token in range(max(0, upto - pool.reach.num_tokens), upto):
                part = pool.table[blocks[token // self.block_size]]
                if part < 0:
                    return False
                assert content[part, token % self.block_size] == identities[token], f"token {token} has a wrong part"
        return True

    def is_published(self, identity: int) -> bool:
        """Whether a prefix is cached."""
        return identity in self._published

    def was_published(self, identity: int) -> bool:
        """Whether a prefix could be matched at any time."""
        return identity in self._ever_published

    def runs(self) -> list[tuple[Namespace, bytes]]:
        """Return all published runs, each to its end."""
        return list(self._longest.values())

    def publish(self, namespace: Namespace, tokens: bytes, identities: Identities) -> None:
        """Note that a whole run is published."""
        numbers = identities.tolist()
        if numbers[-1] not in self._published:
            for number in numbers:
                self._longest.pop(number, None)
            self._longest[numbers[-1]] = namespace, tokens
            self._published.update(numbers)
            self._ever_published.update(numbers)
            self.retention.published(numbers)

    def forget_evicted(self, cache: PrefixCache) -> int:
        """Copy from the cache what an eviction has left. Returns the number of evicted tokens."""
        num_before = len(self._published)
        runs, self._longest, self._published = self.runs(), {}, set()
        for namespace, tokens in runs:
            tree = cache._trees.get(namespace)
            kept_bytes = 4 * namespace.public_prefix_tokens if tree is None else tree.match(tokens)[1]
            if kept_bytes:
                tokens = tokens[:kept_bytes]
                self.publish(namespace, tokens, self.identities(namespace, tokens))
        self.retention.forget_all_but(self._published)
        return num_before - len(self._published)

    def forget(self, is_gone: Callable[[Namespace], bool]) -> None:
        """Forget everything that is published in some namespaces."""
        runs, self._longest, self._published = self.runs(), {}, set()
        for namespace, tokens in runs:
            if not is_gone(namespace):
                self.publish(namespace, tokens, self.identities(namespace, tokens))
        self.retention.forget_all_but(self._published)

    def verify_priorities(self, tree: RadixTree) -> None:
        """Assert that every block of a tree has its expected priority."""
        for node in tree.nodes():
            path = self.retention.path(self.identities(tree.owner.namespace, tree.path_tokens(node)).tolist())
            expected = {self.retention.priority(block) for block in path[len(path) - node.num_blocks :]}
            assert expected == {node.priority}, f"expected priorities {expected}, got {node.priority}"

    def hand_out(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Fill blocks that have a new owner with poison."""
        self.content[block_ids] = UNWRITTEN
        self._handed_out.update(block_ids.tolist())

    def poison_free_blocks(self, cache: PrefixCache) -> None:
        states = cache.pool.states()
        free = [block_id for block_id in self._handed_out if states[block_id] == BlockState.FREE]
        self.content[free] = FREE
        self._handed_out.difference_update(free)

    def verify(self, block_ids: npt.NDArray[np.int32], identities: Identities) -> None:
        """Assert that blocks hold the K/V of these tokens."""
        held = self.content[block_ids].ravel()[: identities.size]
        assert np.array_equal(held, identities), f"expected {identities.tolist()}, got {held.tolist()}"

    def verify_match(self, match: Match, identities: Identities) -> None:
        assert match.block_ids.size == -(-match.cached_tokens // self.block_size)
        self.verify(match.block_ids, identities[: match.cached_tokens])


@dataclass
class Holder:
    """A holder of a lease, which computes the prompt's K/V chunk by chunk."""

    oracle: Oracle
    lease: Lease
    identities: Identities
    contents: Identities
    num_written: int = 0
    is_revoked: bool = False
    held_block_ids: npt.NDArray[np.int32] | None = None  # while the lease is held
    num_held_tokens: int = 0

    def receive(self) -> None:
        """Assert that the reused blocks of a new lease hold the right K/V, and fill the new ones with poison."""
        oracle, lease = self.oracle, self.lease
        self.num_written = lease.cached_tokens
        num_whole = lease.cached_tokens // oracle.block_size
        assert lease.block_ids.size == -(-lease.num_tokens // oracle.block_size)
        assert (lease.copy is not None) == (lease.cached_tokens % oracle.block_size > 0)
        oracle.hand_out(lease.block_ids[num_whole:])
        if lease.copy is not None:
            assert lease.copy.target == lease.block_ids[num_whole]
        self.verify()

    def write(self, upto: int) -> None:
        """Compute the prompt up to a token."""
        while self.lease.windows and self.num_written < upto:
            self.write_parts(min(upto, self.num_written + STEP_TOKENS))
        self.begin()
        for position in range(self.num_written, upto):
            self._write(position)
        self.num_written = max(self.num_written, upto)

    def _write(self, position: int) -> None:
        block, offset = divmod(position, self.oracle.block_size)
        self.oracle.content[self.lease.block_ids[block], offset] = self.contents[position]

    def write_parts(self, upto: int) -> None:
        """Compute one step, with the parts of blocks."""
        lease, size, start = self.lease, self.oracle.block_size, self.num_written
        for holder, pool, content in zip(lease.windows, self.oracle.parts.pools, self.oracle.part_content, strict=True):
            part_ids, copy = holder.cover(lease.block_ids, start, upto, lease.copy)
            if copy is not None:
                content[copy.target] = content[copy.source]
            for position in range(max(0, start - pool.reach.num_tokens), start):
                held = content[part_ids[position // size], position % size]
                assert held == self.contents[position], f"token {position} within reach is not what was computed"
            for position in range(start, upto):
                content[part_ids[position // size], position % size] = self.contents[position]
            holder.settle(upto)
        self.copy_block()
        for position in range(start, upto):
            self._write(position)
        self.num_written = upto

    def begin(self) -> None:
        """Make the pending block copy of the lease, if there is one."""
        if self.lease.copy is not None and self.lease.windows:
            self.write_parts(self.num_written)
        self.copy_block()

    def copy_block(self) -> None:
        copy = self.lease.copy
        if copy is not None:
            self.oracle.content[copy.target] = self.oracle.content[copy.source]
            self.lease.copy = None

    def extend(self, tokens: bytes) -> int:
        """Extend the lease. Returns the number of new blocks."""
        before = self.lease.block_ids
        self.lease.extend(tokens)
        new = self.lease.block_ids[~np.isin(self.lease.block_ids, before)]
        self.oracle.hand_out(new)
        self.identities = self.oracle.identities(self.lease.namespace, self.lease.tokens)
        self.contents = self.oracle.contents(self.lease.namespace, self.lease.tokens)
        assert self.lease.block_ids.size == -(-self.lease.num_tokens // self.oracle.block_size)
        return int(new.size)

    @property
    def num_matchable(self) -> int:
        """Count the tokens that the lease keeps in the tree."""
        return self.lease.committed_tokens if self.held_block_ids is None else self.num_held_tokens

    def hold(self) -> None:
        """Only hold the blocks from now on. A block that continues in a copy is held as that copy."""
        self.begin()
        self.held_block_ids = self.lease.block_ids.copy()
        self.num_held_tokens = self.lease.num_published_blocks * self.oracle.block_size
        self.num_held_tokens = min(self.num_held_tokens, self.lease.committed_tokens)
        self.lease.hold()

    def verify(self) -> None:
        """Assert that everything reused or written until now is in place."""
        block_ids, copy = self.lease.block_ids, self.lease.copy
        if self.held_block_ids is not None:
            block_ids = self.held_block_ids
        if copy is not None:
            block_ids = np.where(block_ids == copy.target, np.int32(copy.source), block_ids)
        self.oracle.verify(block_ids, self.contents[: self.num_written])
