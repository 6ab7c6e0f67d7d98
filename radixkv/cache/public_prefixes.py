"""Public prefixes: prompts of the operator whose blocks all tenants use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from radixkv.blocks import BlockIds
from radixkv.cache.cache_state import CacheState
from radixkv.cache.lease import Lease, OpenLeases
from radixkv.cache.radix_tree import RootPrefix
from radixkv.cache.windowed_layers import WindowLease
from radixkv.errors import (
    InvalidRequest,
    InvariantViolation,
    OutOfBlocks,
    SwitchedOff,
    UnknownPublicPrefix,
    require_invariant,
)
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.tokens import TOKEN_BYTES, shared_bytes

_MAX_FREED_NODES = 1024  # the tree of a prefix has far fewer nodes


class PublicPrefix:
    """Tokens that an operator made public.

        registered ── computed ──▶ matched by prompts ── unregistered ──▶ draining ── the last lease closes ──▶ freed

    Attributes:
        name: given by the operator.
        tokens: little-endian uint32 bytes of at least one block, as the cache knows them.
        num_blocks: blocks that it takes, or will take when it is computed.
        namespace: namespace of the tree that holds only this prefix.
        adapter: digest of the adapter that computes the prefix, or its end; empty for the base model.
        lease: keeps the blocks; None until they are computed.
        num_users: open leases that use the blocks.
        num_uses: leases that have used the blocks so far.
        is_computing: whether the request that computes the prefix is still running.
    """

    __slots__ = (
        "_root_prefixes",
        "adapter",
        "is_computing",
        "lease",
        "name",
        "namespace",
        "num_blocks",
        "num_users",
        "num_uses",
        "tokens",
    )

    def __init__(self, name: str, namespace: Namespace, tokens: bytes, num_blocks: int, adapter: str) -> None:
        self.name = name
        self.adapter = adapter
        self.namespace = namespace
        self.tokens = tokens
        self.num_blocks = num_blocks
        self.lease: Lease | None = None
        self.num_users = 0
        self.num_uses = 0
        self.is_computing = True
        self._root_prefixes: dict[int, RootPrefix] = {}

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """The blocks in order, int32; none until they are computed."""
        return np.empty(0, np.int32) if self.lease is None else self.lease.block_ids

    def root_prefix(self, num_blocks: int, block_bytes: int) -> RootPrefix:
        """Return the first `num_blocks` whole blocks, as one object for all trees that are rooted after them."""
        root_prefix = self._root_prefixes.get(num_blocks)
        if root_prefix is None:
            root_prefix = RootPrefix(self.tokens[: num_blocks * block_bytes], self.block_ids[:num_blocks].tobytes())
            self._root_prefixes[num_blocks] = root_prefix
        return root_prefix


class PublicRoot(NamedTuple):
    """A position at which a prompt diverges from a public prefix, and the tree of its namespace that begins there.

    Attributes:
        prefix: the public prefix.
        namespace: namespace of the tree.
        root_prefix: the whole blocks that the prompt shares, at least one.
        num_more_tokens: tokens at the beginning of the next public block that the prompt shares as well.
        next_block: packed id of that block; empty if no token of it is shared.
    """

    prefix: PublicPrefix
    namespace: Namespace
    root_prefix: RootPrefix
    num_more_tokens: int = 0
    next_block: bytes = b""


class PublicPrefixes:
    """The public prefixes of a cache. Each is cached in a tree of its own, which holds only the operator's tokens.

    What a tenant adds is in a tree of the tenant's namespace, whose root holds the blocks of the prefix before it:

        (public)   [ system prompt ................ ]
                             │                     │
        acme                 └─ tree               └─ tree        one tree per namespace and position
        other                                      └─ tree

    A prompt shares a prefix up to some token; its tree begins after the whole blocks before that token. So prompts of a
    namespace that diverge from the prefix in the same block are in the same tree, and reuse each other's tokens there.

    Iterating yields the registered prefixes in the order of registration.

    Args:
        state: the state of the cache.
        leases: the open leases of the cache.
        max_blocks: maximum number of blocks of all public prefixes together.

    Attributes:
        max_blocks: see above.
        are_any_computed: whether prompts can match any public prefix.
    """

    def __init__(self, state: CacheState, leases: OpenLeases, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.are_any_computed = False
        self._state = state
        self._leases = leases
        self._block_size = state.block_size
        self._block_bytes = state.block_size * TOKEN_BYTES
        self._serials = count(1)
        self._by_name: dict[str, PublicPrefix] = {}
        self._draining: set[PublicPrefix] = set()
        # Computed prefixes by model, adapter and the bytes of their first block, in the order of registration.
        self._computed: dict[tuple[str, str, bytes], list[PublicPrefix]] = {}

    def __iter__(self) -> Iterator[PublicPrefix]:
        return iter(list(self._by_name.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks that public prefixes take, or will take when they are computed."""
        return sum(each.num_blocks for each in (*self._by_name.values(), *self._draining))

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of the computed prefixes that are registered; they cannot be evicted."""
        return sum(each.num_blocks for each in self if each.lease is not None)

    def is_registered(self, prefix: PublicPrefix) -> bool:
        """Return whether a prefix is registered."""
        return self._by_name.get(prefix.name) is prefix

    def register(self, name: str, model: str, adapter: str, tokens: bytes, *, invoked: str = "") -> PublicPrefix:
        """Register a prefix. The caller computes it in `PublicPrefix.namespace`, and then calls `activate`.

        Args:
            name: must be unique.
            model, adapter: as in `Namespace`.
            tokens: little-endian uint32 bytes, as the cache knows them.
            invoked: digest of the adapter that is invoked inside the prefix; empty for none.

        Raises:
            SwitchedOff: the model has recurrent states.
            InvalidRequest: the name is empty or in use, or the tokens are fewer than a block.
            OutOfBlocks: public prefixes would take too many blocks, or too many parts of windowed layers.
        """
        if self._state.state_slots is not None:
            raise SwitchedOff(
                "public prefixes: expected a model without recurrent states, got one with recurrent states"
            )
        if not name:
            raise InvalidRequest("name: expected at least 1 character, got 0")
        if name in self._by_name:
            raise InvalidRequest("name: expected a new name, got that of a registered public prefix")
        if len(tokens) < self._block_bytes:
            raise InvalidRequest(
                f"token_ids: expected at least {self._block_size}, a block, got {len(tokens) // TOKEN_BYTES}"
            )
        num_blocks = -(-len(tokens) // self._block_bytes)
        if self.num_blocks + num_blocks > self.max_blocks:
            raise OutOfBlocks(
                f"public prefixes: expected at most {self.max_blocks} blocks of {self._block_size} tokens in all, "
                f"got {self.num_blocks + num_blocks}"
            )
        self._state.windows.require_lasting_room(len(tokens) // TOKEN_BYTES)
        namespace = Namespace(model, PUBLIC_TENANT, adapter, salt=str(next(self._serials)))
        self._by_name[name] = PublicPrefix(name, namespace, tokens, num_blocks, invoked or adapter)
        return self._by_name[name]

    def activate(self, prefix: PublicPrefix) -> None:
        """Pin the blocks of a prefix that was just computed, and let prompts match it.

        Raises:
            UnknownPublicPrefix: it was unregistered in the meantime, and its blocks are free.
            OutOfBlocks, QuotaExceeded: the pools of windowed layers have no room for it, or the tenant of public
                prefixes is at its ceiling. Call `abandon` to free its blocks.
            InvariantViolation: it is not completely cached. Call `abandon` to free the cached blocks.
        """
        if not self.is_registered(prefix):
            self.abandon(prefix)
            raise UnknownPublicPrefix("name: expected a registered public prefix, got one that was unregistered")
        tree = self._state.trees.get(prefix.namespace)
        node, num_bytes, packed, num_nodes = (None, 0, b"", 0) if tree is None else tree.match(prefix.tokens)
        if node is None or num_bytes < len(prefix.tokens):
            raise InvariantViolation("public prefix: expected all of its tokens to be cached, got fewer")
        block_ids = np.frombuffer(packed, np.int32)
        windows = self._open_windows(prefix, block_ids)
        for window in windows:
            window.keep()
        prefix.is_computing = False
        self._state.pins.pin(node)
        usage = self._state.tenants[PUBLIC_TENANT]
        prefix.lease = Lease(
            self._leases,
            prefix.namespace,
            usage,
            prefix.tokens,
            prefix.num_tokens,
            block_ids,
            block_ids.size,
            node=node,
            node_used_s=node.last_used_s,
            num_nodes=num_nodes,
            windows=windows,
        )
        self._computed.setdefault(self._key(prefix.namespace, prefix.tokens), []).append(prefix)
        self.are_any_computed = True

    def _open_windows(self, prefix: PublicPrefix, block_ids: BlockIds) -> Sequence[WindowLease]:
        """Make room for all parts of a prefix, and pin them."""
        layers, evictor = self._state.windows, self._state.evictor
        usage = self._state.tenants[PUBLIC_TENANT]
        num_blocks = layers.num_blocks_to_reserve(prefix.num_tokens, keeps_all=True)
        num_missing_blocks = num_blocks - evictor.num_takeable_blocks(PUBLIC_TENANT, usage)
        if num_missing_blocks > 0:
            raise evictor.shortage_error(num_missing_blocks, PUBLIC_TENANT, usage)
        windows = layers.pin(block_ids, prefix.num_tokens, prefix.num_tokens, keeps_all=True)
        evictor.make_room(0, PUBLIC_TENANT, usage, windows)
        layers.reserve(windows)
        return windows

    def abandon(self, prefix: PublicPrefix) -> None:
        """Unregister a prefix whose computation failed, and free its blocks. Call it after its request has ended."""
        prefix.is_computing = False
        if self.is_registered(prefix):
            self.unregister(prefix.name)
        elif prefix in self._draining:
            self._free(prefix)

    def unregister(self, name: str) -> PublicPrefix:
        """Stop prompts from matching a prefix. Its blocks are freed when the last lease that uses them is closed.

        A prefix that is being computed keeps its blocks until the computation ends. Trees below the prefix stay until
        they are evicted, and are never matched again.

        Raises:
            UnknownPublicPrefix: no prefix has this name.
        """
        prefix = self._by_name.pop(name, None)
        if prefix is None:
            raise UnknownPublicPrefix("name: expected the name of a public prefix, got an unknown one")
        key = self._key(prefix.namespace, prefix.tokens)
        if prefix in self._computed.get(key, ()):
            self._computed[key].remove(prefix)
            if not self._computed[key]:
                del self._computed[key]
        self.are_any_computed = bool(self._computed)
        self._draining.add(prefix)
        if not prefix.num_users and not prefix.is_computing:
            self._free(prefix)
        return prefix

    def roots(self, namespace: Namespace, tokens: bytes) -> Iterator[PublicRoot]:
        """Yield the positions at which a prompt could diverge from public prefixes that share a block with it.

        The first position is after the last whole block that the prompt shares with a prefix. The others are positions
        of existing trees that may have more of the prompt. Such a tree is older than a longer prefix, or belongs to an
        earlier prompt that ended at the end of a block of the prefix: its last token was computed, so its tree begins
        one block earlier, and the next turn must find its completion there.

        A public prefix is computed as a whole: the prompt of the prefix itself has no roots.

        Complexity: a memory comparison per prefix, and a look-up per tree of the namespace below one of them.
        """
        if namespace.tenant == PUBLIC_TENANT:
            return
        prefixes = self._computed.get(self._key(namespace, tokens), ())
        if not prefixes or not self._state.tenants.quota_of(namespace.tenant).uses_public_prefixes:
            return
        max_tokens = len(tokens) // TOKEN_BYTES - 1  # the last token is always computed
        shared = [(min(shared_bytes(each.tokens, tokens, 0) // TOKEN_BYTES, max_tokens), each) for each in prefixes]
        num_tokens, longest = max(shared, key=lambda each: each[0])
        num_blocks, num_more_tokens = divmod(num_tokens, self._block_size)
        if not num_blocks:
            return
        next_block = longest.block_ids[num_blocks : num_blocks + 1].tobytes() if num_more_tokens else b""
        yield self._make_root(namespace, longest, num_blocks, num_more_tokens, next_block)
        for num_shared_tokens, prefix in shared:
            for tree in self._state.trees.below(namespace, prefix.namespace.salt):
                start = len(tree.root.tokens) // TOKEN_BYTES
                end = start + self._block_size
                next_tokens = tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
                may_have_more = end > num_tokens or next_tokens in (tree.root.children or ())
                is_first = prefix is longest and start == num_blocks * self._block_size
                if start <= num_shared_tokens and may_have_more and not is_first:
                    yield self._make_root(namespace, prefix, start // self._block_size)

    def _make_root(
        self,
        namespace: Namespace,
        prefix: PublicPrefix,
        num_blocks: int,
        num_more_tokens: int = 0,
        next_block: bytes = b"",
    ) -> PublicRoot:
        tree_namespace = namespace._replace(public_prefix=f"{prefix.namespace.salt}:{num_blocks * self._block_size}")
        root_prefix = prefix.root_prefix(num_blocks, self._block_bytes)
        return PublicRoot(prefix, tree_namespace, root_prefix, num_more_tokens, next_block)

    def enter(self, prefix: PublicPrefix) -> None:
        """Count a lease that uses a prefix from now on, until `leave`."""
        prefix.num_users += 1
        prefix.num_uses += 1

    def leave(self, prefix: PublicPrefix) -> None:
        """Record that a lease no longer uses a prefix."""
        prefix.num_users -= 1
        if prefix in self._draining and not prefix.num_users:
            self._free(prefix)

    def tokens_of(self, namespace: Namespace) -> bytes | None:
        """Return the tokens above a namespace's tree: empty without a public prefix; None if it no longer exists.

        Complexity: O(public prefixes) if the tree is below a prefix, otherwise O(1).
        """
        if not namespace.public_prefix:
            return b""
        serial, _, _ = namespace.public_prefix.partition(":")
        for prefix in (*self._by_name.values(), *self._draining):
            if prefix.namespace.salt == serial:
                return prefix.tokens[: namespace.public_prefix_tokens * TOKEN_BYTES]
        return None

    def unregister_all(self, adapter: str) -> None:
        """Unregister the prefixes of an adapter, given by its digest."""
        for prefix in self:
            if prefix.adapter == adapter:
                self.unregister(prefix.name)

    def check(self) -> None:
        """Compare the users of each prefix with the open leases, and the index with what is computed.

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        computed = [each for prefixes in self._computed.values() for each in prefixes]
        for prefix in (*self._by_name.values(), *self._draining):
            serial_prefix = f"{prefix.namespace.salt}:"
            num_users = sum(lease.namespace.public_prefix.startswith(serial_prefix) for lease in self._leases)
            require_invariant("public prefix", prefix.num_users == num_users, "its users are not the open leases")
            is_found = prefix.lease is not None and prefix not in self._draining
            require_invariant("public prefix", (prefix in computed) == is_found, "the index is not what is computed")
        require_invariant(
            "public prefix",
            all(each.num_users or each.is_computing for each in self._draining),
            "an unregistered one stays that no lease uses and no request computes",
        )

    def _free(self, prefix: PublicPrefix) -> None:
        self._draining.remove(prefix)
        if prefix.lease is not None:
            prefix.lease.close()
            prefix.lease = None
        tree = self._state.trees.get(prefix.namespace)
        if tree is not None:
            self._state.evictor.purge_leaves(tree, _MAX_FREED_NODES)

    def _key(self, namespace: Namespace, tokens: bytes) -> tuple[str, str, bytes]:
        return namespace.model, namespace.adapter, tokens[: self._block_bytes]
