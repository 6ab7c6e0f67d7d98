"""A slow and obvious model of the cache, and a memory in which every slot's content is recognizable.

Every prefix in a namespace gets a number of its own, its identity. The identity of the prefix that a token ends stands
in for the K/V of this token: as with real K/V, two slots hold the same content only if all tokens up to them are equal.
Free and unwritten slots hold poison. So a block that was reused wrongly, published too early, freed while in use, or
overwritten shows as a wrong number.
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
STEP_TOKENS = 7  # maximum number of tokens that one request computes in one step of windowed layers

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
        # By last identity: the published prompts that no other one continues.
        self._longest: dict[int, tuple[Namespace, bytes]] = {}

    def identities(self, namespace: Namespace, tokens: bytes) -> Identities:
        """Return the identity of each prefix of a prompt."""
        numbers = []
        before: object = tuple(namespace)  # a plain tuple, so that namespaces are not compared as in the cache
        for token in np.frombuffer(tokens, dtype="<u4").tolist():
            before = self._identities.setdefault((before, token), len(self._identities))
            numbers.append(before)
        return np.array(numbers, dtype=np.int64)

    def contents(self, namespace: Namespace, tokens: bytes) -> Identities:
        """Return the content that the slot of each token must have, wherever the prompt is leased.

        Tokens with which a public text begins have the same K/V in all namespaces without an adapter. The content of
        all others depends on the prefix and its namespace.
        """
        plain = namespace._replace(public_prefix="")
        if not self.public_texts:
            return self.identities(plain, tokens)
        is_public = namespace.adapter == ""
        numbers = []
        before: object = tuple(plain)
        for end, token in enumerate(np.frombuffer(tokens, dtype="<u4").tolist(), 1):
            prefix = bytes(tokens[: 4 * end])
            is_public = is_public and any(text.startswith(prefix) for text in self.public_texts)
            key: object = ("public", prefix) if is_public else (before, token)
            before = self._contents.setdefault(key, len(self._contents))
            numbers.append(before)
        return np.array(numbers, dtype=np.int64)

    def num_published(self, identities: Identities) -> int:
        """Count the published tokens of a prompt."""
        for num_tokens, identity in enumerate(identities.tolist()):
            if identity not in self._published:
                return num_tokens
        return identities.size

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

    def _has_parts(self, blocks: npt.NDArray[np.int32], contents: Identities, upto: int) -> bool:
        """Return whether all tokens in the window after `upto` tokens have parts. Asserts the content of the parts."""
        for pool, content in zip(self.parts.pools, self.part_content, strict=True):
            for position in range(max(0, upto - pool.reach.num_tokens), upto):
                part = pool.table[blocks[position // self.block_size]]
                if part < 0:
                    return False
                is_right = content[part, position % self.block_size] == contents[position]
                assert is_right, f"the part of token {position} has other content"
        return True

    def is_published(self, identity: int) -> bool:
        """Return whether a prefix is cached."""
        return identity in self._published

    def was_published(self, identity: int) -> bool:
        """Return whether a prefix is or was cached."""
        return identity in self._ever_published

    def runs(self) -> list[tuple[Namespace, bytes]]:
        """Return the published prompts that no other published prompt continues, with their namespaces."""
        return list(self._longest.values())

    def publish(self, namespace: Namespace, tokens: bytes, identities: Identities) -> None:
        """Record that all tokens of a prompt are published."""
        prefixes = identities.tolist()
        if prefixes[-1] not in self._published:
            for prefix in prefixes:
                self._longest.pop(prefix, None)
            self._longest[prefixes[-1]] = namespace, tokens
            self._published.update(prefixes)
            self._ever_published.update(prefixes)
            self.retention.record_published(prefixes)

    def forget_evicted(self, cache: PrefixCache) -> int:
        """Forget all tokens that the cache has evicted. Returns their number."""
        num_published_before = len(self._published)
        runs, self._longest, self._published = self.runs(), {}, set()
        for namespace, tokens in runs:
            tree = cache._trees.get(namespace)
            cached_bytes = 4 * namespace.public_prefix_tokens if tree is None else tree.match(tokens)[1]
            if cached_bytes:
                tokens = tokens[:cached_bytes]
                self.publish(namespace, tokens, self.identities(namespace, tokens))
        self.retention.forget_all_but(self._published)
        return num_published_before - len(self._published)

    def forget(self, is_gone: Callable[[Namespace], bool]) -> None:
        """Forget all tokens of purged namespaces, for which `is_gone` is true."""
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
        """Fill newly allocated blocks with poison."""
        self.content[block_ids] = UNWRITTEN
        self._handed_out.update(block_ids.tolist())

    def poison_free_blocks(self, cache: PrefixCache) -> None:
        """Fill the blocks that were freed since the last call with poison."""
        states = cache.pool.states()
        free = [block_id for block_id in self._handed_out if states[block_id] == BlockState.FREE]
        self.content[free] = FREE
        self._handed_out.difference_update(free)

    def verify(self, block_ids: npt.NDArray[np.int32], contents: Identities) -> None:
        """Assert that blocks hold these contents."""
        held = self.content[block_ids].ravel()[: contents.size]
        assert np.array_equal(held, contents), f"expected {contents.tolist()}, got {held.tolist()}"

    def verify_match(self, match: Match, contents: Identities) -> None:
        """Assert that a match has the right blocks, given the contents of the whole prompt."""
        assert match.block_ids.size == -(-match.cached_tokens // self.block_size)
        self.verify(match.block_ids, contents[: match.cached_tokens])


@dataclass
class Holder:
    """Stands in for a request: has a lease, and computes the K/V of its prompt chunk by chunk.

    Attributes:
        identities, contents: of the tokens of the lease; see `Oracle`.
        num_written: tokens at the beginning that are reused or computed.
        is_revoked: whether the namespace was purged, so that the lease publishes nothing more.
        held_block_ids: the blocks of the lease when `hold` was called; None before.
        num_held_tokens: published tokens in these blocks.
    """

    oracle: Oracle
    lease: Lease
    identities: Identities
    contents: Identities
    num_written: int = 0
    is_revoked: bool = False
    held_block_ids: npt.NDArray[np.int32] | None = None
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
        """Compute the first `upto` tokens."""
        while self.lease.windows and self.num_written < upto:
            self._write_step(min(upto, self.num_written + STEP_TOKENS))
        self.make_copy()
        for position in range(self.num_written, upto):
            self._write(position)
        self.num_written = max(self.num_written, upto)

    def _write(self, position: int) -> None:
        block, offset = divmod(position, self.oracle.block_size)
        self.oracle.content[self.lease.block_ids[block], offset] = self.contents[position]

    def _write_step(self, upto: int) -> None:
        """Compute the first `upto` tokens in one step, with their parts."""
        lease, size, start = self.lease, self.oracle.block_size, self.num_written
        groups = zip(lease.windows, self.oracle.parts.pools, self.oracle.part_content, strict=True)
        for window_lease, pool, content in groups:
            part_ids, copy = window_lease.cover(lease.block_ids, start, upto, lease.copy)
            if copy is not None:
                content[copy.target] = content[copy.source]
            for position in range(max(0, start - pool.reach.num_tokens), start):
                held = content[part_ids[position // size], position % size]
                assert held == self.contents[position], (
                    f"the part of token {position}, in the window, has other content"
                )
            for position in range(start, upto):
                content[part_ids[position // size], position % size] = self.contents[position]
            window_lease.settle(upto)
        self._copy_block()
        for position in range(start, upto):
            self._write(position)
        self.num_written = upto

    def make_copy(self) -> None:
        """Make the pending copy of a block and of its parts, if there is one."""
        if self.lease.copy is not None and self.lease.windows:
            self._write_step(self.num_written)
        self._copy_block()

    def _copy_block(self) -> None:
        copy = self.lease.copy
        if copy is not None:
            self.oracle.content[copy.target] = self.oracle.content[copy.source]
            self.lease.copy = None

    def extend(self, tokens: bytes) -> int:
        """Extend the lease. Returns the number of new blocks."""
        block_ids_before = self.lease.block_ids
        self.lease.extend(tokens)
        new_block_ids = self.lease.block_ids[~np.isin(self.lease.block_ids, block_ids_before)]
        self.oracle.hand_out(new_block_ids)
        self.identities = self.oracle.identities(self.lease.namespace, self.lease.tokens)
        self.contents = self.oracle.contents(self.lease.namespace, self.lease.tokens)
        assert self.lease.block_ids.size == -(-self.lease.num_tokens // self.oracle.block_size)
        return int(new_block_ids.size)

    @property
    def num_kept_tokens(self) -> int:
        """Tokens at the beginning that stay in the tree because of the lease."""
        return self.lease.committed_tokens if self.held_block_ids is None else self.num_held_tokens

    def hold(self) -> None:
        """Hold the lease. A pending copy is made first, so that its target is held."""
        self.make_copy()
        self.held_block_ids = self.lease.block_ids.copy()
        self.num_held_tokens = self.lease.num_published_blocks * self.oracle.block_size
        self.num_held_tokens = min(self.num_held_tokens, self.lease.committed_tokens)
        self.lease.hold()

    def verify(self) -> None:
        """Assert that the blocks hold all contents that were reused or written until now."""
        block_ids, copy = self.lease.block_ids, self.lease.copy
        if self.held_block_ids is not None:
            block_ids = self.held_block_ids
        if copy is not None:  # until the copy is made, its source holds the contents
            block_ids = np.where(block_ids == copy.target, np.int32(copy.source), block_ids)
        self.oracle.verify(block_ids, self.contents[: self.num_written])
