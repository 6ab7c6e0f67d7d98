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
from radixkv.offload.index.prompt_blocks import KeyBlocks, KeyedBlock, StoredBlock
from radixkv.offload.index.retention import RetentionHint, StoredRetention
from radixkv.offload.index.tier_index import StoreListener, TierIndex
from radixkv.tokens import TOKEN_BYTES


class EvictedBlock(NamedTuple):
    """A block that leaves the device, and is to be stored before anybody writes over it.

    Attributes:
        block: what it is.
        block_id: where it still is.
        tiers: names of the tiers that are to store it.
        part_id: where its part still is, see `radixkv/cache/parts`; None if it has none.
    """

    block: KeyedBlock
    block_id: int
    tiers: Sequence[str]
    part_id: int | None = None


class OffloadIndex(Listener):
    """Decides which evicted blocks are stored where, and knows where they are.

        tree ── evicted ──▶ evicted_blocks ── the engine copies them ──▶ stores
          ▲                                                            │ stored
          └────────────── committed ◀── loaded ◀── find ───────────────┘

    Only whole blocks are stored: a partly filled block is recomputed. Every evicted block is stored in every tier that
    does not hold it yet, whether it was ever reused or not; docs/LOG.md says why ("what is worth writing"). A full tier
    evicts the block that left the device longest ago, and retained blocks last. Shared stores get a block when it is
    published, so that other servers find it.

    Args:
        tiers: an index per tier, the fastest first.
        key_blocks: computes the keys of a prompt's blocks.
        block_size: tokens per block.
        part_of: returns where the windowed layers of a block are; `NO_PART` if they are not stored. None if no layers
            are windowed, or for such a block.

    Attributes:
        tiers: the indexes by name of the tier.
        key_blocks: see above.
        retention: priorities of stored blocks.
        listener: is notified of what the tiers hold; see `subscribe`.
    """

    def __init__(
        self,
        tiers: Sequence[TierIndex],
        key_blocks: KeyBlocks,
        block_size: int,
        part_of: Callable[[int], int | None] = lambda block_id: None,
    ) -> None:
        self.tiers = {tier_index.name: tier_index for tier_index in tiers}
        self.retention = StoredRetention(self.tiers)
        self.listener = StoreListener()
        self.key_blocks = key_blocks
        self._shared = [tier_index.name for tier_index in tiers if tier_index.is_shared]
        self._part_of = part_of
        self._trunk_of: Callable[[Namespace], bytes | None] = lambda namespace: None if namespace.trunk else b""
        self._chains = NodeKeys(key_blocks, block_size)
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._evicted_blocks: list[EvictedBlock] = []
        self._given_up: dict[str, dict[bytes, None]] = {name: {} for name in self.tiers}

    def subscribe(self, listener: StoreListener) -> None:
        """Notify a listener of the blocks that tiers hold from now on."""
        self.listener = listener
        for tier_index in self.tiers.values():
            tier_index.subscribe(listener)

    def read_public_prefixes(self, trunk_of: Callable[[Namespace], bytes | None]) -> None:
        """Read the tokens of public prefixes with a function of the cache, which is built after its listeners.

        Args:
            trunk_of: returns the tokens of the public prefix before a namespace's own; None if it is not registered
                any more.
        """
        self._trunk_of = trunk_of

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, as far as can be known without asking shared stores."""
        return not self._shared and not any(map(len, self.tiers.values()))

    @property
    def has_evicted_blocks(self) -> bool:
        """Whether blocks are to be stored; see `take_evicted_blocks`."""
        return bool(self._evicted_blocks)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Note that shared stores are to have a new leaf."""
        self.grown(leaf, leaf.num_blocks, now_s)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Note that shared stores are to have the blocks at the end of a leaf that are whole now."""
        if self._shared:
            self.leave(leaf, max(0, leaf.num_blocks - num_new_blocks - 1), leaf.num_blocks, self._shared)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Note which blocks are to be stored; see `leave`."""
        num_kept_blocks = leaf.num_blocks - num_blocks
        if self.tiers:
            self.leave(leaf, num_kept_blocks, leaf.num_blocks, self.tiers)
        self._chains.shortened(leaf, num_kept_blocks)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Give both halves of a node their keys."""
        self._chains.split(lower)

    def cut(self, lower: Node) -> None:
        """Give both halves of a node their keys."""
        self._chains.split(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Give a node the keys of those that are joined to it."""
        self._chains.joined(uppers, lower)

    def leave(self, node: Node, start: int, end: int, tier_indexes: Iterable[str]) -> list[bytes]:
        """Note that the blocks from `start` to `end` of a node are to be stored where they are not yet.

        Returns:
            The keys of those that can be stored, in the order of the prompt.

        Complexity: that of `NodeKeys.blocks`; and a hash of all tokens up to `end` for the first blocks that leave a
        node with a priority above the default, and for all of which a listener is told.
        """
        namespace = node.owner.namespace
        trunk = None if namespace.tenant == PUBLIC_TENANT else self._trunk_of(namespace)
        if trunk is None:
            return []
        namespace = namespace._replace(trunk="")
        blocks = self._chains.blocks(node, start, end, trunk)
        first = node.start_bytes // self._block_bytes + start
        tokens = b""
        if node.priority != DEFAULT_PRIORITY or self.listener.is_on:
            tokens = b"".join((trunk, *(each.tokens for each in path_to(node))))
        if node.priority != DEFAULT_PRIORITY:
            hint = RetentionHint(node.priority, None if node.expiry_entry is None else node.expiry_entry[0])
            self.retention.note_leaving(blocks, hint, first, self.key_blocks(namespace, tokens))
        block_ids = memoryview(node.block_ids).cast("i")[start : start + len(blocks)]
        pairs = list(zip(blocks, block_ids, strict=True))
        for block, block_id in reversed(pairs):  # the end goes first on tier_indexes, too
            part_id = self._part_of(block_id)
            names = [name for name in tier_indexes if self._wants(self.tiers[name], block, part_id)]
            if names:
                self._evicted_blocks.append(
                    EvictedBlock(block, block_id, names, None if part_id == NO_PART else part_id)
                )
        if self.listener.is_on:
            self.listener.met(namespace, tokens, first, blocks)
        return [block.key for block in blocks]

    def left(self, name: str, keys: Sequence[bytes]) -> None:
        """Let blocks go after all that left the device before, their end first; keys in the order of the prompt."""
        for key in reversed(keys):
            if key in self.tiers[name]:
                self.tiers[name].note_left(key, self.retention.priority_of(key))

    def retain(
        self, namespace: Namespace, tokens: bytes, start: int, end: int, num_cached_blocks: int, hint: RetentionHint
    ) -> tuple[int, int]:
        """Give the stored ones of a prompt's blocks a priority, whatever it was before. Shared stores know none.

        Args:
            namespace, tokens: of the prompt, as for `find`.
            start, end: its blocks to give a priority, from `start` to before `end`.
            num_cached_blocks: whole blocks of the prompt that are on the device, and get their priority there.
            hint: the priority.

        Returns:
            How many blocks of the range after the cached ones have the priority, up to the first that has not; and how
            many are stored, up to the first that is nowhere.

        Complexity: a hash of the tokens up to `end`.
        """
        path = list(islice(self.key_blocks(namespace, tokens), end))
        self.retention.set(path, start, hint)
        return self.retention.granted(path[max(start, num_cached_blocks) :], hint.priority)

    def take_evicted_blocks(self) -> tuple[list[EvictedBlock], dict[str, list[bytes]]]:
        """Return what has left since the last call, and for each store the keys that go for it, in their order."""
        evicted_blocks, self._evicted_blocks = self._evicted_blocks, []
        given_up, self._given_up = self._given_up, {name: {} for name in self.tiers}
        return evicted_blocks, {name: list(keys) for name, keys in given_up.items()}

    def find(self, namespace: Namespace, tokens: bytes, num_cached_blocks: int) -> list[StoredBlock]:
        """List the blocks that follow the cached ones of a prompt and are stored, up to the first that is not.

        Args:
            namespace: of the prompt.
            tokens: the prompt as the cache knows it; its last token is always computed.
            num_cached_blocks: whole blocks of it that are on the device.

        Complexity: a hash of the tokens up to the first block that is nowhere.
        """
        found: list[StoredBlock] = []
        for block in islice(self.key_blocks(namespace, tokens[:-TOKEN_BYTES]), num_cached_blocks, None):
            tier_index = next((name for name, tier_index in self.tiers.items() if tier_index.holds(block.key)), None)
            if tier_index is None:
                break
            found.append(StoredBlock(block, tier_index, block.key not in self.tiers[tier_index].partless))
        if self.listener.is_on:
            self.listener.met(namespace, tokens, num_cached_blocks, [each.block for each in found])
        return found

    def unknown(self, namespace: Namespace, tokens: bytes, num_cached_blocks: int) -> list[KeyedBlock]:
        """List the blocks that follow the cached ones of a prompt, and of which no store is known to have them.

        Args:
            namespace, tokens, num_cached_blocks: as for `find`.

        Complexity: a hash of all tokens.
        """
        blocks = islice(self.key_blocks(namespace, tokens[:-TOKEN_BYTES]), num_cached_blocks, None)
        return [block for block in blocks if not any(tier_index.holds(block.key) for tier_index in self.tiers.values())]

    def discovered(self, name: str, blocks: Iterable[KeyedBlock]) -> None:
        """Note that a shared store has blocks."""
        tier_index = self.tiers[name]
        for block in blocks:
            if block.key not in tier_index:
                tier_index.add(block.key, block.namespace)
            tier_index.note_stored(block.key)

    def loaded(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are on the device again; keys in the order of the prompt."""
        for key in reversed(keys):
            for tier_index in self.tiers.values():
                if key in tier_index:
                    tier_index.note_loaded(key)

    def stored(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store has these blocks now."""
        for key in keys:
            self.tiers[name].note_stored(key)

    def came_without_parts(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store has these blocks without their parts, so that they are written once more with them."""
        tier_index = self.tiers[name]
        tier_index.partless.update(key for key in keys if key in tier_index)

    def lost(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store does not have these blocks."""
        for key in keys:
            self.tiers[name].remove(key)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> dict[str, list[bytes]]:
        """Forget the blocks of all namespaces with these names, None for any. Returns their keys for each store.

        Complexity: O(namespaces + blocks of these).
        """
        names = tenant, adapter, salt
        self.retention.purge(*names)
        self._evicted_blocks = [each for each in self._evicted_blocks if not each.block.namespace.is_among(*names)]
        keys: dict[str, list[bytes]] = {}
        for name, tier_index in self.tiers.items():
            gone = [each for each in tier_index.owned if each.is_among(*names)]
            keys[name] = [key for namespace in gone for key in tier_index.remove_all(namespace)]
        return keys

    def drop_given_up(self, name: str, is_chosen: Callable[[bytes], bool]) -> list[bytes]:
        """Forget and return the chosen keys that are to go from a store, which was not told yet."""
        chosen = [key for key in self._given_up[name] if is_chosen(key)]
        for key in chosen:
            del self._given_up[name][key]
        return chosen

    def _wants(self, tier_index: TierIndex, block: KeyedBlock, part_id: int | None) -> bool:
        """Whether a store is to be given a block, which may be there without the part that it has now."""
        priority = self.retention.priority_of(block.key)
        has_part = part_id is not None and part_id != NO_PART
        if block.key in tier_index:
            tier_index.note_left(block.key, priority)
            if has_part and block.key in tier_index.partless:
                tier_index.expect(block.key)
                return True
            return False
        if not tier_index.has_room_for(block.namespace.tenant, priority):
            return False
        victim, given_up = tier_index.add(block.key, block.namespace, priority), self._given_up[tier_index.name]
        if victim is not None:
            given_up[victim] = None
        if part_id == NO_PART:
            tier_index.partless.add(block.key)
        if block.key not in given_up:
            return True
        del given_up[block.key]  # the store was not told, and still has it, perhaps without its part
        if has_part:
            tier_index.expect(block.key)
            return True
        tier_index.note_stored(block.key)
        return False


def grant_stored(
    offload_index: OffloadIndex,
    block_size: int,
    namespace: Namespace,
    tokens: bytes,
    retention: Retention,
    on_device: Grant,
    now_s: float,
) -> Grant:
    """Give what is stored of a prompt a priority, whatever it was before; shared stores know none.

    Args:
        offload_index: knows what is stored.
        block_size: tokens a block.
        namespace, tokens: the prompt, as the cache knows it.
        retention: the priority and its range.
        on_device: what the cache granted of it.
        now_s: the time, by the cache's clock.

    Returns:
        What was granted in all.
    """
    start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
    cached = end - on_device.uncached_tokens
    end_kept = start + on_device.granted_tokens if on_device.refused_tokens else end  # no use behind a gap
    expires_s = None if retention.ttl_s is None else now_s + retention.ttl_s
    first, last, num_cached_blocks = start // block_size, -(-end_kept // block_size), cached // block_size
    hint = RetentionHint(retention.priority, expires_s)
    num_granted, num_stored = offload_index.retain(namespace, tokens, first, last, num_cached_blocks, hint)
    first = max(first, num_cached_blocks)
    stored = max(cached, min(end, (first + num_stored) * block_size)) - cached
    granted = max(cached, min(end, (first + num_granted) * block_size)) - cached
    return on_device._replace(uncached_tokens=0).joined(
        Grant(granted, stored - granted, end - cached - stored, expires_s if granted else None)
    )
