"""The index of all tiers: which evicted block is stored where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY, Grant, Retention
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node, path_to
from radixkv.cache.window_pool import NO_PART
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.index.node_keys import NodeKeys
from radixkv.offload.index.prompt_blocks import BlockKeyFunction, KeyedBlock, StoredBlock
from radixkv.offload.index.retention import RetentionHint, StoredRetention
from radixkv.offload.index.tier_index import StoreListener, TierIndex
from radixkv.offload.index.used_nodes import UsedNodes
from radixkv.tokens import TOKEN_BYTES


class EvictedBlock(NamedTuple):
    """A block that the device evicted, or that was published, to be copied before its memory is reused.

    Attributes:
        block: its key and tokens.
        block_id: its id in the block pool.
        tiers: names of the tiers that will store it.
        part_id: its part of windowed layers (`radixkv/cache/windowed_layers.md`); None if it has none.
    """

    block: KeyedBlock
    block_id: int
    tiers: Sequence[str]
    part_id: int | None = None


class OffloadIndex(Listener):
    """Decides in which tiers evicted blocks are stored, and knows which tiers hold the blocks of a prompt.

        radix tree ── evicted ──▶ take_evicted_blocks ── the engine copies them ──▶ tiers
            ▲                                                                         │ stored
            └────────── committed ◀── loaded ◀── find ────────────────────────────────┘

    Only whole blocks are stored: a partly filled block is recomputed. Blocks of public prefixes are not stored. Every
    other evicted block is queued for each tier that does not hold it yet and has room for it (see
    `TierIndex.has_room_for`), whether it was reused or not; docs/LOG.md ("What is worth writing") gives the reasons.
    For the order in which a full tier evicts blocks, see `TierIndex`. Shared stores get a block when it is published,
    so that other servers find it.

    Args:
        tiers: an index per tier, the fastest first.
        key_blocks: computes the keys of a prompt's blocks.
        block_size: tokens per block.
        part_of: returns the part of windowed layers of a block: `NO_PART` if the block has none, None if the model has
            no windowed layers.

    Attributes:
        tiers: the indexes by name of the tier.
        key_blocks: see above.
        retention: priorities of stored blocks.
        listener: is notified of what the tiers hold; see `subscribe`.
        used_nodes: the nodes that were used or published recently, if there are shared stores; see `Touches`.
    """

    def __init__(
        self,
        tiers: Sequence[TierIndex],
        key_blocks: BlockKeyFunction,
        block_size: int,
        part_of: Callable[[int], int | None] = lambda block_id: None,
    ) -> None:
        self.tiers = {tier_index.name: tier_index for tier_index in tiers}
        self.retention = StoredRetention(self.tiers)
        self.listener = StoreListener()
        self.key_blocks = key_blocks
        self.used_nodes = UsedNodes(block_size)
        self._shared = [tier_index.name for tier_index in tiers if tier_index.is_shared]
        self._part_of = part_of
        self._tokens_of_prefix: Callable[[Namespace], bytes | None] = _tokens_without_prefixes
        self._node_keys = NodeKeys(key_blocks, block_size)
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._evicted_blocks: list[EvictedBlock] = []
        self._victims: dict[str, dict[bytes, None]] = {name: {} for name in self.tiers}

    def subscribe(self, listener: StoreListener) -> None:
        """Notify a listener of the blocks that tiers hold from now on."""
        self.listener = listener
        for tier_index in self.tiers.values():
            tier_index.subscribe(listener)

    def set_tokens_of_prefix(self, tokens_of: Callable[[Namespace], bytes | None]) -> None:
        """Set the function of the cache that returns the tokens of public prefixes; the cache is built after the index.

        Args:
            tokens_of: returns the tokens of the public prefix above a namespace's tree; None if it is no longer
                registered.
        """
        self._tokens_of_prefix = tokens_of

    @property
    def is_empty(self) -> bool:
        """Whether no tier holds blocks, and there are no shared stores that could."""
        return not self._shared and not any(map(len, self.tiers.values()))

    @property
    def has_evicted_blocks(self) -> bool:
        """Whether blocks are to be stored; see `take_evicted_blocks`."""
        return bool(self._evicted_blocks)

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Record a use for the shared stores. Complexity: O(1)."""
        if self._shared:
            self.used_nodes.add(node, num_bytes)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Queue a new leaf for the shared stores."""
        self.grown(leaf, leaf.num_blocks, now_s)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Queue the blocks at the end of a leaf that have become full, for the shared stores."""
        if self._shared:
            # The block before the new ones may have been partly filled, and become full.
            self.queue(leaf, max(0, leaf.num_blocks - num_new_blocks - 1), leaf.num_blocks, self._shared)
            # Recorded as a use, so that the beginning of the prompt becomes the most recent in the store.
            self.used_nodes.add(leaf, leaf.start_bytes + len(leaf.tokens))

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Queue evicted blocks for the tiers; see `queue`."""
        num_kept_blocks = leaf.num_blocks - num_blocks
        if self.tiers:
            self.queue(leaf, num_kept_blocks, leaf.num_blocks, self.tiers)
        self._node_keys.shortened(leaf, num_kept_blocks)
        if not num_kept_blocks:
            self.used_nodes.evicted(leaf)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Divide the keys between the two halves of a split node."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Divide the keys between the two halves of a split node."""
        self._node_keys.split(lower)
        self.used_nodes.split(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Give a node the keys of the nodes that are merged into it."""
        self._node_keys.joined(uppers, lower)
        self.used_nodes.joined(uppers, lower)

    def purged(self, node: Node) -> None:
        """Forget the uses of a node."""
        self.used_nodes.purged(node)

    def queue(self, node: Node, start: int, end: int, tier_names: Iterable[str]) -> list[bytes]:
        """Queue the blocks from `start` to `end` of a node for those tiers that do not hold them yet.

        Returns:
            The keys of the whole ones among these blocks, whether they were queued or not, in the order of the prompt.
            Empty for blocks of a public prefix, and of a tree below one that is no longer registered.

        Complexity: that of `NodeKeys.blocks`. If the node's priority is not the default, or a listener is on, also a
        copy of the path's tokens, and if the priority is above the default, at most a hash of all tokens up to `end`.
        """
        namespace = node.owner.namespace
        prefix_tokens = None if namespace.tenant == PUBLIC_TENANT else self._tokens_of_prefix(namespace)
        if prefix_tokens is None:
            return []
        namespace = namespace._replace(public_prefix="")
        blocks = self._node_keys.blocks(node, start, end, prefix_tokens)
        first = node.start_bytes // self._block_bytes + start
        tokens = b""
        if node.priority != DEFAULT_PRIORITY or self.listener.is_on:
            tokens = b"".join((prefix_tokens, *(each.tokens for each in path_to(node))))
        if node.priority != DEFAULT_PRIORITY:
            hint = RetentionHint(node.priority, None if node.expiry_entry is None else node.expiry_entry[0])
            self.retention.note_evicted(blocks, hint, first, self.key_blocks(namespace, tokens))
        block_ids = memoryview(node.block_ids).cast("i")[start : start + len(blocks)]
        pairs = list(zip(blocks, block_ids, strict=True))
        for block, block_id in reversed(pairs):  # tiers also evict the end of a prompt first
            part_id = self._part_of(block_id)
            names = [name for name in tier_names if self._admit(self.tiers[name], block, part_id)]
            if names:
                self._evicted_blocks.append(
                    EvictedBlock(block, block_id, names, None if part_id == NO_PART else part_id)
                )
        if self.listener.is_on:
            self.listener.identified(namespace, tokens, first, blocks)
        return [block.key for block in blocks]

    def store_again(self, name: str, keys: Sequence[bytes]) -> int:
        """Queue blocks for a shared store again, if they are still on the device.

        Only the nodes of the last touch are searched, which are those of the last `UsedNodes.take`.

        Args:
            name: name of the store, which no longer holds the blocks.
            keys: keys of the blocks.

        Returns:
            The number of blocks that were queued.

        Complexity: O(blocks of the touched nodes), and a hash of the tokens of those that have such a block.
        """
        wanted = set(keys)
        num_queued = len(self._evicted_blocks)
        for node in sorted(self.used_nodes.taken, key=lambda node: -node.start_bytes):  # a prompt's end first
            indexes = [index for index, key in enumerate(node.keys or ()) if key in wanted]
            if indexes:
                self.queue(node, indexes[0], indexes[-1] + 1, [name])
        return len(self._evicted_blocks) - num_queued

    def note_evicted(self, name: str, keys: Sequence[bytes]) -> None:
        """Move blocks to the end of the eviction order, so that the last block of a prompt is evicted first.

        The keys are in the order of the prompt.
        """
        for key in reversed(keys):
            if key in self.tiers[name]:
                self.tiers[name].note_evicted(key, self.retention.priority_of(key))

    def retain(
        self, namespace: Namespace, tokens: bytes, retention: Retention, on_device: Grant, now_s: float
    ) -> Grant:
        """Set the priority of the stored blocks of a prompt, whatever it was before. Shared stores have no priorities.

        Args:
            namespace, tokens: the prompt, in the form of the cache.
            retention: the priority and its range.
            on_device: the grant of the cache.
            now_s: the time, by the cache's clock.

        Returns:
            The total grant, on the device and in the tiers.

        Complexity: a hash of the tokens up to the end of the range.
        """
        start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
        cached_end = end - on_device.uncached_tokens
        # If the cache refused a part of the range, later blocks get no priority, since they are useless after a gap.
        retained_end = start + on_device.granted_tokens if on_device.refused_tokens else end
        expires_s = None if retention.ttl_s is None else now_s + retention.ttl_s

        block_size = self._block_size
        first_block = start // block_size
        end_block = -(-retained_end // block_size)  # rounded up
        path = list(islice(self.key_blocks(namespace, tokens), end_block))
        self.retention.set(path, first_block, RetentionHint(retention.priority, expires_s))
        first_uncached_block = max(first_block, cached_end // block_size)
        num_granted, num_stored = self.retention.granted(path[first_uncached_block:], retention.priority)

        # From blocks to tokens between `cached_end` and `end`.
        stored_tokens = max(cached_end, min(end, (first_uncached_block + num_stored) * block_size)) - cached_end
        granted_tokens = max(cached_end, min(end, (first_uncached_block + num_granted) * block_size)) - cached_end
        refused_tokens = stored_tokens - granted_tokens
        uncached_tokens = end - cached_end - stored_tokens
        return on_device._replace(uncached_tokens=0).joined(
            Grant(granted_tokens, refused_tokens, uncached_tokens, expires_s if granted_tokens else None)
        )

    def take_evicted_blocks(self) -> tuple[list[EvictedBlock], dict[str, list[bytes]]]:
        """Take the queued blocks, and for each tier the keys to evict first if it needs space for them, in order."""
        evicted_blocks, self._evicted_blocks = self._evicted_blocks, []
        victims, self._victims = self._victims, {name: {} for name in self.tiers}
        return evicted_blocks, {name: list(keys) for name, keys in victims.items()}

    def find(self, namespace: Namespace, tokens: bytes, num_cached_blocks: int) -> list[StoredBlock]:
        """List the stored blocks that follow the cached ones of a prompt, up to the first that no tier holds.

        Args:
            namespace: namespace of the prompt.
            tokens: the prompt as the cache stores it; its last token is always computed.
            num_cached_blocks: its whole blocks that are on the device.

        Complexity: a hash of the tokens up to the first block that no tier holds.
        """
        found: list[StoredBlock] = []
        for block in islice(self.key_blocks(namespace, tokens[:-TOKEN_BYTES]), num_cached_blocks, None):
            name = next((name for name, tier_index in self.tiers.items() if tier_index.holds(block.key)), None)
            if name is None:
                break
            found.append(StoredBlock(block, name, block.key not in self.tiers[name].partless))
        if self.listener.is_on:
            self.listener.identified(namespace, tokens, num_cached_blocks, [each.block for each in found])
        return found

    def find_unknown(self, namespace: Namespace, tokens: bytes, num_cached_blocks: int) -> list[KeyedBlock]:
        """List the blocks that follow the cached ones of a prompt and that no tier is known to hold.

        Args:
            namespace, tokens, num_cached_blocks: as for `find`.

        Complexity: a hash of all tokens.
        """
        blocks = islice(self.key_blocks(namespace, tokens[:-TOKEN_BYTES]), num_cached_blocks, None)
        return [block for block in blocks if not any(tier_index.holds(block.key) for tier_index in self.tiers.values())]

    def discovered(self, name: str, blocks: Iterable[KeyedBlock]) -> None:
        """Record that a shared store holds blocks."""
        tier_index = self.tiers[name]
        for block in blocks:
            if block.key not in tier_index:
                tier_index.add(block.key, block.namespace)
            tier_index.note_stored(block.key)

    def loaded(self, keys: Sequence[bytes]) -> None:
        """Record that blocks were loaded onto the device; keys in the order of the prompt."""
        for key in reversed(keys):
            for tier_index in self.tiers.values():
                if key in tier_index:
                    tier_index.note_loaded(key)

    def stored(self, name: str, keys: Sequence[bytes]) -> None:
        """Record that a tier has stored these blocks."""
        for key in keys:
            self.tiers[name].note_stored(key)

    def note_partless(self, name: str, keys: Sequence[bytes]) -> None:
        """Record that a tier holds blocks without their parts, so that they are written again with their parts."""
        tier_index = self.tiers[name]
        tier_index.partless.update(key for key in keys if key in tier_index)

    def lost(self, name: str, keys: Sequence[bytes]) -> None:
        """Record that a tier does not hold these blocks."""
        for key in keys:
            self.tiers[name].remove(key)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> dict[str, list[bytes]]:
        """Remove the blocks of all namespaces with these names, None for any. Returns their keys by tier.

        Complexity: O(namespaces + blocks of the purged namespaces).
        """
        names = tenant, adapter, salt
        self.retention.purge(*names)
        self._evicted_blocks = [each for each in self._evicted_blocks if not each.block.namespace.is_among(*names)]
        keys: dict[str, list[bytes]] = {}
        for name, tier_index in self.tiers.items():
            purged = [each for each in tier_index.owned if each.is_among(*names)]
            keys[name] = [key for namespace in purged for key in tier_index.remove_all(namespace)]
        return keys

    def drop_victims(self, name: str, is_chosen: Callable[[bytes], bool]) -> list[bytes]:
        """Remove and return the chosen victims of a tier that were not yet passed to its store."""
        chosen = [key for key in self._victims[name] if is_chosen(key)]
        for key in chosen:
            del self._victims[name][key]
        return chosen

    def _admit(self, tier_index: TierIndex, block: KeyedBlock, part_id: int | None) -> bool:
        """Admit a block to a tier that has room and lacks the block, or that lacks the part that the block has now.

        Returns:
            Whether the tier must store the block. If so, the block is pending, and a victim was queued if needed.
        """
        priority = self.retention.priority_of(block.key)
        has_part = part_id is not None and part_id != NO_PART
        if block.key in tier_index:
            tier_index.note_evicted(block.key, priority)
            if has_part and block.key in tier_index.partless:
                tier_index.begin_rewrite(block.key)
                return True
            return False
        if not tier_index.has_room_for(block.namespace.tenant, priority):
            return False
        victim = tier_index.add(block.key, block.namespace, priority)
        victims = self._victims[tier_index.name]
        if victim is not None:
            victims[victim] = None
        if part_id == NO_PART:
            tier_index.partless.add(block.key)
        if block.key not in victims:
            return True
        # The store was not yet asked to evict the block, so it still holds it, perhaps without its part.
        del victims[block.key]
        if has_part:
            tier_index.begin_rewrite(block.key)
            return True
        tier_index.note_stored(block.key)
        return False


def _tokens_without_prefixes(namespace: Namespace) -> bytes | None:
    """Return what `set_tokens_of_prefix` describes, as long as no public prefix is known."""
    return None if namespace.public_prefix else b""
