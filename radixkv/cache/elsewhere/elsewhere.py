"""Places of the blocks that left the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.changes import Listener
from radixkv.cache.elsewhere.found import Found
from radixkv.cache.elsewhere.key_chains import KeyChains
from radixkv.cache.elsewhere.keyed_block import KeyBlocks, KeyedBlock
from radixkv.cache.elsewhere.retentions import Wish
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.elsewhere.store_listener import StoreListener
from radixkv.cache.elsewhere.stored_retention import StoredRetention
from radixkv.cache.node import Node, path_to
from radixkv.cache.window_pool import NO_PART
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.tokens import TOKEN_BYTES


class Departure(NamedTuple):
    """A block that leaves the device, and is to be stored before anybody writes over it.

    Attributes:
        block: what it is.
        block_id: where it still is.
        shelves: names of the stores that are to have it.
        part_id: where its part still is, see `radixkv/cache/parts`; None if it has none.
    """

    block: KeyedBlock
    block_id: int
    shelves: Sequence[str]
    part_id: int | None = None


class Elsewhere(Listener):
    """Decides which evicted blocks are stored where, and knows where they are.

        tree ── evicted ──▶ departures ── the engine copies them ──▶ stores
          ▲                                                            │ stored
          └────────────── committed ◀── loaded ◀── find ───────────────┘

    Whole blocks only: a block that is filled in part is computed again. Every block that leaves is stored on every
    shelf that does not have it, used before or not: docs/LOG.md, "what is worth writing". A shelf without room gives up
    what left the device longest ago, and what callers asked to keep after all else. Shared stores get a block when it
    is published, so that other servers find it.

    Args:
        shelves: the stores, the fastest first.
        key_blocks: makes the keys of a prompt's blocks.
        block_size: tokens a block.

    Attributes:
        shelves: see above, by name.
        key_blocks: see above.
        retention: what callers asked to keep of what is stored.
        listener: is told which blocks the stores have; see `tell`.
        part_of: returns the part of a block; None if blocks have no parts, `NO_PART` if this one has none.
        trunk_of: returns the tokens of a public prefix that come before all of a namespace's own, as the cache knows
            them; None if they are not known anymore.
    """

    def __init__(self, shelves: Sequence[Shelf], key_blocks: KeyBlocks, block_size: int) -> None:
        self.shelves = {shelf.name: shelf for shelf in shelves}
        self.retention = StoredRetention(self.shelves)
        self.listener = StoreListener()
        self._shared = [shelf.name for shelf in shelves if shelf.is_shared]
        self.part_of: Callable[[int], int | None] = lambda block_id: None
        self.trunk_of: Callable[[Namespace], bytes | None] = lambda namespace: None if namespace.trunk else b""
        self.key_blocks = key_blocks
        self._chains = KeyChains(key_blocks, block_size)
        self._block_bytes = block_size * TOKEN_BYTES
        self._departures: list[Departure] = []
        self._given_up: dict[str, dict[bytes, None]] = {name: {} for name in self.shelves}

    def tell(self, listener: StoreListener) -> None:
        """Have a listener told which blocks the stores have."""
        self.listener = listener
        for shelf in self.shelves.values():
            shelf.listener = listener

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, as far as can be known without asking shared stores."""
        return not self._shared and not any(map(len, self.shelves.values()))

    @property
    def has_departures(self) -> bool:
        """Whether blocks are to be stored; see `take_departures`."""
        return bool(self._departures)

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
        if self.shelves:
            self.leave(leaf, num_kept_blocks, leaf.num_blocks, self.shelves)
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

    def leave(self, node: Node, start: int, end: int, shelves: Iterable[str]) -> list[bytes]:
        """Note that the blocks from `start` to `end` of a node are to be stored where they are not yet.

        Returns:
            The keys of those that can be stored, in the order of the prompt.

        Complexity: that of `KeyChains.blocks`; and a hash of all tokens up to `end` for the first blocks that leave a
        node with a priority above the default, and for all of which a listener is told.
        """
        namespace = node.owner.namespace
        trunk = None if namespace.tenant == PUBLIC_TENANT else self.trunk_of(namespace)
        if trunk is None:
            return []
        namespace = namespace._replace(trunk="")
        blocks = self._chains.blocks(node, start, end, trunk)
        first = node.start_bytes // self._block_bytes + start
        tokens = b""
        if node.priority != DEFAULT_PRIORITY or self.listener.is_on:
            tokens = b"".join((trunk, *(each.tokens for each in path_to(node))))
        if node.priority != DEFAULT_PRIORITY:
            wish = Wish(node.priority, None if node.expiry_entry is None else node.expiry_entry[0])
            self.retention.note_leaving(blocks, wish, first, self.key_blocks(namespace, tokens))
        block_ids = memoryview(node.block_ids).cast("i")[start : start + len(blocks)]
        pairs = list(zip(blocks, block_ids, strict=True))
        for block, block_id in reversed(pairs):  # the end goes first on shelves, too
            part_id = self.part_of(block_id)
            names = [name for name in shelves if self._wants(self.shelves[name], block, part_id)]
            if names:
                self._departures.append(Departure(block, block_id, names, None if part_id == NO_PART else part_id))
        if self.listener.is_on:
            self.listener.met(namespace, tokens, first, blocks)
        return [block.key for block in blocks]

    def left(self, name: str, keys: Sequence[bytes]) -> None:
        """Let blocks go after all that left the device before, their end first; keys in the order of the prompt."""
        for key in reversed(keys):
            if key in self.shelves[name]:
                self.shelves[name].note_left(key, self.retention.priority_of(key))

    def retain(
        self, namespace: Namespace, tokens: bytes, start: int, end: int, num_cached_blocks: int, wish: Wish
    ) -> tuple[int, int]:
        """Give the stored ones of a prompt's blocks a priority, whatever it was before. Shared stores know none.

        Args:
            namespace, tokens: of the prompt, as for `find`.
            start, end: its blocks to give a priority, from `start` to before `end`.
            num_cached_blocks: whole blocks of the prompt that are on the device, and get their priority there.
            wish: the priority.

        Returns:
            How many blocks of the range after the cached ones have the priority, up to the first that has not; and how
            many are stored, up to the first that is nowhere.

        Complexity: a hash of the tokens up to `end`.
        """
        path = list(islice(self.key_blocks(namespace, tokens), end))
        self.retention.set(path, start, wish)
        return self.retention.granted(path[max(start, num_cached_blocks) :], wish.priority)

    def take_departures(self) -> tuple[list[Departure], dict[str, list[bytes]]]:
        """Return what has left since the last call, and for each store the keys that go for it, in their order."""
        departures, self._departures = self._departures, []
        given_up, self._given_up = self._given_up, {name: {} for name in self.shelves}
        return departures, {name: list(keys) for name, keys in given_up.items()}

    def find(self, namespace: Namespace, tokens: bytes, num_cached_blocks: int) -> list[Found]:
        """List the blocks that follow the cached ones of a prompt and are stored, up to the first that is not.

        Args:
            namespace: of the prompt.
            tokens: the prompt as the cache knows it; its last token is always computed.
            num_cached_blocks: whole blocks of it that are on the device.

        Complexity: a hash of the tokens up to the first block that is nowhere.
        """
        found: list[Found] = []
        for block in islice(self.key_blocks(namespace, tokens[:-TOKEN_BYTES]), num_cached_blocks, None):
            shelf = next((name for name, shelf in self.shelves.items() if shelf.holds(block.key)), None)
            if shelf is None:
                break
            found.append(Found(block, shelf, block.key not in self.shelves[shelf].partless))
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
        return [block for block in blocks if not any(shelf.holds(block.key) for shelf in self.shelves.values())]

    def discovered(self, name: str, blocks: Iterable[KeyedBlock]) -> None:
        """Note that a shared store has blocks."""
        shelf = self.shelves[name]
        for block in blocks:
            if block.key not in shelf:
                shelf.add(block.key, block.namespace)
            shelf.note_stored(block.key)

    def loaded(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are on the device again; keys in the order of the prompt."""
        for key in reversed(keys):
            for shelf in self.shelves.values():
                if key in shelf:
                    shelf.note_loaded(key)

    def stored(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store has these blocks now."""
        for key in keys:
            self.shelves[name].note_stored(key)

    def came_without_parts(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store has these blocks without their parts, so that they are written once more with them."""
        shelf = self.shelves[name]
        shelf.partless.update(key for key in keys if key in shelf)

    def lost(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a store does not have these blocks."""
        for key in keys:
            self.shelves[name].remove(key)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> dict[str, list[bytes]]:
        """Forget the blocks of all namespaces with these names, None for any. Returns their keys for each store.

        Complexity: O(namespaces + blocks of these).
        """
        names = tenant, adapter, salt
        self.retention.purge(*names)
        self._departures = [each for each in self._departures if not each.block.namespace.is_among(*names)]
        keys: dict[str, list[bytes]] = {}
        for name, shelf in self.shelves.items():
            gone = [each for each in shelf.owned if each.is_among(*names)]
            keys[name] = [key for namespace in gone for key in shelf.remove_all(namespace)]
        return keys

    def drop_given_up(self, name: str, is_chosen: Callable[[bytes], bool]) -> list[bytes]:
        """Forget and return the chosen keys that are to go from a store, which was not told yet."""
        chosen = [key for key in self._given_up[name] if is_chosen(key)]
        for key in chosen:
            del self._given_up[name][key]
        return chosen

    def _wants(self, shelf: Shelf, block: KeyedBlock, part_id: int | None) -> bool:
        """Whether a store is to be given a block, which may be there without the part that it has now."""
        priority = self.retention.priority_of(block.key)
        has_part = part_id is not None and part_id != NO_PART
        if block.key in shelf:
            shelf.note_left(block.key, priority)
            if has_part and block.key in shelf.partless:
                shelf.expect(block.key)
                return True
            return False
        if not shelf.has_room_for(block.namespace.tenant, priority):
            return False
        victim, given_up = shelf.add(block.key, block.namespace, priority), self._given_up[shelf.name]
        if victim is not None:
            given_up[victim] = None
        if part_id == NO_PART:
            shelf.partless.add(block.key)
        if block.key not in given_up:
            return True
        del given_up[block.key]  # the store was not told, and still has it, perhaps without its part
        if has_part:
            shelf.expect(block.key)
            return True
        shelf.note_stored(block.key)
        return False
