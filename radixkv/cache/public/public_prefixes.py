"""The public prefixes of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from radixkv.blocks import BlockIds
from radixkv.cache.cache_state import CacheState
from radixkv.cache.evictor import Evictor
from radixkv.cache.lease import Lease
from radixkv.cache.ledger import Ledger
from radixkv.cache.pins import Pins
from radixkv.cache.public.public_prefix import PublicPrefix
from radixkv.errors import (
    InvalidRequest,
    InvariantViolation,
    OutOfBlocks,
    SwitchedOff,
    UnknownPublicPrefix,
    require_invariant,
)
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.tokens import TOKEN_BYTES

_MAX_NODES = 1024


class PublicPrefixes:
    """Prefixes whose blocks the prompts of every tenant use, each in a tree of its own.

    Iterating over it yields the prefixes that are not unregistered, the first one first.

    Args:
        holdings: what the cache holds.
        pins, evictor, ledger: the parts of the cache that keep, free and lease it.
        max_blocks: blocks that public prefixes may take.

    Attributes:
        max_blocks: see above.
    """

    def __init__(self, holdings: CacheState, pins: Pins, evictor: Evictor, ledger: Ledger, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._block_size = holdings.block_size
        self._trees = holdings.trees
        self._tenants = holdings.tenants
        self._pins = pins
        self._evictor = evictor
        self._ledger = ledger
        self._parts = holdings.parts
        self._serials = count(1)
        self._by_name: dict[str, PublicPrefix] = {}
        self._leaving: set[PublicPrefix] = set()
        # Those that are computed, by model, adapter and the bytes of their first block; the first one first.
        self._computed: dict[tuple[str, str, bytes], list[PublicPrefix]] = {}

    def __iter__(self) -> Iterator[PublicPrefix]:
        return iter(list(self._by_name.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks that public prefixes take, or will when they are computed."""
        return sum(self._num_blocks(each.tokens) for each in (*self._by_name.values(), *self._leaving))

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that those which are computed keep until they are unregistered."""
        return sum(self._num_blocks(each.tokens) for each in self if each.lease is not None)

    @property
    def are_any_computed(self) -> bool:
        """Whether prompts may find any."""
        return bool(self._computed)

    def holds(self, prefix: PublicPrefix) -> bool:
        """Whether a prefix is registered."""
        return self._by_name.get(prefix.name) is prefix

    def num_blocks_of(self, prefix: PublicPrefix) -> int:
        """Return the blocks that a prefix takes, or will when it is computed."""
        return self._num_blocks(prefix.tokens)

    def register(self, name: str, model: str, adapter: str, tokens: bytes, *, invoked: str = "") -> PublicPrefix:
        """Register a prefix, which is to be computed in its namespace; `keep` it then.

        Args:
            name: not given to another one.
            model, adapter: as in `Namespace`.
            tokens: little-endian uint32 bytes, as the cache knows them.
            invoked: digest of the adapter that is invoked in it; empty for none.

        Raises:
            SwitchedOff: the model keeps states.
            InvalidRequest: the name is empty or taken, or the tokens are fewer than a block.
            OutOfBlocks: public prefixes would take too many blocks, or too many parts of windowed layers.
        """
        if self._parts.states is not None:
            raise SwitchedOff("public prefixes: expected a model without states, got one whose requests each need one")
        if not name:
            raise InvalidRequest("name: expected at least 1 character, got 0")
        if name in self._by_name:
            raise InvalidRequest("name: expected one that no public prefix has, got one that is registered")
        if len(tokens) < self._block_bytes:
            raise InvalidRequest(
                f"token_ids: expected at least {self._block_size}, a block, got {len(tokens) // TOKEN_BYTES}"
            )
        num_blocks = self.num_blocks + self._num_blocks(tokens)
        if num_blocks > self.max_blocks:
            raise OutOfBlocks(
                f"public prefixes: expected at most {self.max_blocks} blocks of {self._block_size} tokens in all, "
                f"got {num_blocks}"
            )
        self._parts.require_lasting_room(len(tokens) // TOKEN_BYTES)
        namespace = Namespace(model, PUBLIC_TENANT, adapter, salt=str(next(self._serials)))
        self._by_name[name] = PublicPrefix(name, namespace, tokens, invoked or adapter)
        return self._by_name[name]

    def keep(self, prefix: PublicPrefix) -> None:
        """Keep the blocks of a prefix that was computed just now, and let prompts find it.

        Raises:
            UnknownPublicPrefix: it was unregistered meanwhile. Its blocks are free.
            OutOfBlocks: what windowed layers need of it has no room. `give_up` frees it.
            InvariantViolation: it is not cached as a whole; `give_up` frees what is.
        """
        if not self.holds(prefix):
            self.give_up(prefix)
            raise UnknownPublicPrefix("name: expected a registered public prefix, got one that is not any more")
        tree = self._trees.get(prefix.namespace)
        node, num_bytes, packed, num_nodes = (None, 0, b"", 0) if tree is None else tree.match(prefix.tokens)
        if node is None or num_bytes < len(prefix.tokens):
            raise InvariantViolation("public prefix: expected it to be cached, got less of it")
        block_ids = np.frombuffer(packed, np.int32)
        parts = self._parts.open(block_ids, prefix.num_tokens, prefix.num_tokens, keeps_all=True)
        for holder in parts:
            holder.keep()
        prefix.is_computing = False
        self._pins.pin(node)
        usage = self._tenants[PUBLIC_TENANT]
        prefix.lease = Lease(
            self._ledger, prefix.namespace, usage, prefix.tokens, prefix.num_tokens, block_ids, block_ids.size, None,
            node, node.last_used_s, num_nodes=num_nodes,
        )  # fmt: skip
        prefix.lease.parts = parts
        self._ledger.open.add(prefix.lease)
        self._computed.setdefault(self._key(prefix.namespace, prefix.tokens), []).append(prefix)

    def give_up(self, prefix: PublicPrefix) -> None:
        """Unregister a prefix that was not computed, and free what was. Call it when its request is over."""
        prefix.is_computing = False
        if self.holds(prefix):
            self.unregister(prefix.name)
        elif prefix in self._leaving:
            self._free(prefix)

    def unregister(self, name: str) -> PublicPrefix:
        """Let no more prompts find a prefix. Its blocks are free when the last lease that uses them is closed.

        One that is being computed takes its blocks, and counts, until that is over. The trees that hang below are left:
        nothing finds them any more.

        Raises:
            UnknownPublicPrefix: there is none of this name.
        """
        prefix = self._by_name.pop(name, None)
        if prefix is None:
            raise UnknownPublicPrefix("name: expected the name of a public prefix, got an unknown one")
        key = self._key(prefix.namespace, prefix.tokens)
        if prefix in self._computed.get(key, ()):
            self._computed[key].remove(prefix)
            if not self._computed[key]:
                del self._computed[key]
        self._leaving.add(prefix)
        if not prefix.num_users and not prefix.is_computing:
            self._free(prefix)
        return prefix

    def beginning_with(self, namespace: Namespace, tokens: bytes) -> Sequence[PublicPrefix]:
        """List the computed prefixes that share the first block of a tenant's prompt, the first one first.

        A public prefix is computed as a whole: to its own prompt none is listed.
        """
        if not self._computed or namespace.tenant == PUBLIC_TENANT:
            return ()
        return self._computed.get(self._key(namespace, tokens), ())

    def trunk_of(self, namespace: Namespace) -> bytes | None:
        """Return the tokens that come before all of a namespace's own, as the cache knows them; None if they are gone.

        Complexity: O(public prefixes) below one of them.
        """
        if not namespace.trunk:
            return b""
        prefix = self._prefix_above(namespace)
        return None if prefix is None else prefix.tokens[: namespace.trunk_tokens * TOKEN_BYTES]

    def trunk_block_ids(self, namespace: Namespace) -> BlockIds:
        """Return the blocks of the tokens of `trunk_of`, int32, which stay while a lease below them is open."""
        prefix = self._prefix_above(namespace) if namespace.trunk else None
        num_blocks = namespace.trunk_tokens // self._block_size
        return np.empty(0, np.int32) if prefix is None else prefix.block_ids[:num_blocks]

    def unregister_all(self, adapter: str) -> None:
        """Unregister those of an adapter, of which this is the digest."""
        for prefix in self:
            if prefix.adapter == adapter:
                self.unregister(prefix.name)

    def enter(self, prefix: PublicPrefix) -> None:
        """Note that a lease uses a prefix."""
        prefix.num_users += 1
        prefix.num_uses += 1

    def leave(self, prefix: PublicPrefix) -> None:
        """Note that a lease does not use a prefix any more."""
        prefix.num_users -= 1
        if prefix in self._leaving and not prefix.num_users:
            self._free(prefix)

    def check(self) -> None:
        """Compare the users of each prefix with the open leases, and the index with what is computed.

        Raises:
            InvariantViolation: something does not add up.
        """
        computed = [each for prefixes in self._computed.values() for each in prefixes]
        for prefix in (*self._by_name.values(), *self._leaving):
            place = f"{prefix.namespace.salt}:"
            num_users = sum(lease.namespace.trunk.startswith(place) for lease in self._ledger)
            require_invariant("public prefix", prefix.num_users == num_users, "its users are not the open leases")
            is_found = prefix.lease is not None and prefix not in self._leaving
            require_invariant("public prefix", (prefix in computed) == is_found, "the index is not what is computed")
        require_invariant(
            "public prefix",
            all(each.num_users or each.is_computing for each in self._leaving),
            "one stays that nobody uses or computes",
        )

    def _prefix_above(self, namespace: Namespace) -> PublicPrefix | None:
        """Return the prefix below which a tree hangs; None if it is gone."""
        serial, _, _ = namespace.trunk.partition(":")
        prefixes = (*self._by_name.values(), *self._leaving)
        return next((each for each in prefixes if each.namespace.salt == serial), None)

    def _free(self, prefix: PublicPrefix) -> None:
        self._leaving.remove(prefix)
        if prefix.lease is not None:
            prefix.lease.close()
            prefix.lease = None
        tree = self._trees.get(prefix.namespace)
        if tree is not None:
            self._evictor.purge_leaves(tree, _MAX_NODES)

    def _key(self, namespace: Namespace, tokens: bytes) -> tuple[str, str, bytes]:
        return namespace.model, namespace.adapter, tokens[: self._block_bytes]

    def _num_blocks(self, tokens: bytes) -> int:
        return -(-len(tokens) // self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return self._block_size * TOKEN_BYTES
