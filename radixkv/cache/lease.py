"""The right to use and write the blocks of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.node import Node
from radixkv.cache.tenants import TenantUsage
from radixkv.cache.windowed_layers import WindowLease
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


class Keeper(Protocol):
    """Moves the blocks of leases. `Ledger` is the one."""

    def commit(self, lease: Lease, upto_tokens: int) -> int:
        """Carry out `Lease.commit`."""

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Carry out `Lease.reserve`."""

    def give_up(self, lease: Lease, num_blocks: int) -> None:
        """Carry out `Lease.give_up`."""

    def extend(self, lease: Lease, tokens: bytes) -> None:
        """Carry out `Lease.extend`."""

    def keep(self, lease: Lease) -> None:
        """Carry out `Lease.keep`."""

    def close(self, lease: Lease) -> None:
        """Carry out `Lease.close`."""


class Lease:
    """Holds the blocks of a prompt. Reused blocks are read only; the holder of the lease writes the new ones.

        tokens      [0 ............ cached_tokens ............ num_tokens)
        K/V          reused                | the holder computes it
        block_ids    shared, read only | new, writable ...............
                                       └ `copy` fills the beginning of the first new block, if it is set

    `PrefixCache.lease` makes leases. A lease is a context manager: leaving it closes it.

    Attributes:
        namespace: where blocks are published.
        usage: counters of the tenant.
        tokens: the prompt and its extensions, little-endian uint32 bytes; a bytearray once it was extended.
        cached_tokens: tokens whose K/V existed when the lease began.
        public_tokens: those of them that are copied from a public prefix.
        block_ids: int32, all blocks of the tokens in order, and then those that are reserved. `commit` may exchange
            some for equal ones.
        num_published_blocks: number of blocks at the beginning of `block_ids` that belong to the tree. The others are
            the lease's own.
        copy: a block copy to make before anything is written; the holder sets it to None when it is made.
        committed_tokens: tokens known to be matchable: the reused ones, and those published through this lease.
        written_from_tokens: position of the first token that this lease published; None until it publishes any.
        node: the end of the path that this lease pins; None while it pins nothing.
        node_used_s: time of the last use of the matched node before this lease.
        num_expected_tokens: length that it will probably reach; adjacent blocks are left free for that.
        num_nodes: nodes that were passed to find what is reused.
        found_tokens: tokens that were cached, with or without the parts that it takes to go on after them.
        is_resumed: whether its holder goes on after an earlier lease of the same prompt.
        parts: what it keeps of each group of layers that needs less of the prompt.
        is_closed: whether the lease was closed.
        is_kept: whether it only keeps blocks now: see `keep`.
        is_revoked: whether its namespace was purged; if so it publishes nothing more.
    """

    __slots__ = (
        "_keeper",
        "block_ids",
        "cached_tokens",
        "committed_tokens",
        "copy",
        "found_tokens",
        "is_closed",
        "is_kept",
        "is_resumed",
        "is_revoked",
        "namespace",
        "node",
        "node_used_s",
        "num_expected_tokens",
        "num_nodes",
        "num_published_blocks",
        "parts",
        "public_tokens",
        "tokens",
        "usage",
        "written_from_tokens",
    )

    def __init__(
        self,
        keeper: Keeper,
        namespace: Namespace,
        usage: TenantUsage,
        tokens: bytes,
        cached_tokens: int,
        block_ids: BlockIds,
        num_published_blocks: int,
        copy: BlockCopy | None,
        node: Node | None,
        node_used_s: float,
        num_expected_tokens: int = 0,
        num_nodes: int = 0,
        public_tokens: int = 0,
        is_resumed: bool = False,
    ) -> None:
        self._keeper = keeper
        self.namespace = namespace
        self.usage = usage
        self.tokens: bytes | bytearray = tokens
        self.cached_tokens = cached_tokens
        self.block_ids = block_ids
        self.num_published_blocks = num_published_blocks
        self.copy = copy
        self.node = node
        self.node_used_s = node_used_s
        self.num_expected_tokens = num_expected_tokens
        self.num_nodes = num_nodes
        self.public_tokens = public_tokens
        self.committed_tokens = self.found_tokens = cached_tokens
        self.written_from_tokens: int | None = None
        self.is_resumed = is_resumed
        self.parts: Sequence[WindowLease] = ()
        self.is_closed = False
        self.is_kept = False
        self.is_revoked = False

    @property
    def own(self) -> Lease:
        """Itself; see `PromptLease`."""
        return self

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions included."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_dropped_tokens(self) -> int:
        """None; see `PromptLease`."""
        return 0

    @property
    def known_node(self) -> Node | None:
        """The deepest pinned node that begins within what this lease knows to be in the tree; None without one."""
        node = self.node
        while node is not None and node.start_bytes > self.committed_tokens * TOKEN_BYTES:
            node = node.parent  # this lease used the upper half of a node that others cut
        return node

    def commit(self, upto_tokens: int) -> int:
        """Publish finished blocks: the K/V of all tokens before `upto_tokens` are written and final.

        Publishes whole blocks, and the partly filled last one if `upto_tokens` is the end of the prompt. Where another
        lease published the same tokens first, this lease adopts those blocks and gives its own back.

        Returns:
            Tokens that became matchable through this call; 0 once the namespace was purged.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `upto_tokens` is beyond the prompt.

        Example:
            >>> from radixkv.cache.prefix_cache import PrefixCache
            >>> with PrefixCache(num_blocks=8, block_size=4).lease(Namespace("model"), bytes(40)) as lease:
            ...     lease.commit(7), lease.commit(10)  # one whole block; then the end of ten tokens
            (4, 6)
        """
        return self._keeper.commit(self, upto_tokens)

    def reserve(self, num_tokens: int) -> None:
        """Take blocks now for tokens that `extend` will add, or in place of those that were given up.

        A call that raises has changed nothing.

        If a commit after this ends inside a block, the copy of that block takes a reserved one.

        Args:
            num_tokens: length to have blocks for, present tokens included.

        Raises:
            LeaseClosed: the lease is closed.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        self._keeper.reserve(self, num_tokens)

    def give_up(self, num_blocks: int) -> None:
        """Give the last blocks back, until `reserve` takes others in their place. Nothing was written there.

        Args:
            num_blocks: their number. The tokens that are computed, or are being computed, have others.

        Raises:
            LeaseClosed: the lease is closed.
        """
        self._keeper.give_up(self, num_blocks)

    def extend(self, tokens: bytes) -> None:
        """Add tokens to the end of the prompt, and take the blocks they need. A call that raises has changed nothing.

        Committed blocks stay as they are. If they end inside a block, `copy` is set to copy that block, and the longer
        copy replaces it in the tree when it is committed:

            [abcd] [ef..]  both in the tree  ── extend by g ──▶  [abcd] [efg.]  the second is the lease's own

        Args:
            tokens: at least one token, little-endian uint32 bytes.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        self._keeper.extend(self, tokens)

    def keep(self) -> None:
        """Do nothing more but keep the blocks until `close`. What only writing needs, tokens above all, is given up.

        `HeldBlocks` counts what is kept, and says before whether there is room.

        Raises:
            LeaseClosed: the lease is closed.
        """
        self._keeper.keep(self)

    def close(self) -> None:
        """Give all blocks back; what was committed stays cached. Closing again does nothing."""
        self._keeper.close(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
