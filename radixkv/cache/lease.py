"""The scoped right to a prompt's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.blocks import BlockCopy
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from radixkv.blocks import BlockIds
    from radixkv.cache.ledger import Leases
    from radixkv.cache.node import Node
    from radixkv.cache.tenants import TenantUsage
    from radixkv.namespace import Namespace


class Lease:
    """Holds a prompt's blocks: the reused ones stay where they are, the new ones are the holder's to write.

        tokens      [0 ............ cached_tokens ............ num_tokens)
        K/V          reused                | to be computed by the holder
        block_ids    shared, read only | new, writable ...............
                                       └ the first new block begins with `copy`, if that is set

    Made by `PrefixCache.lease`. A context manager: leaving it closes it.

    Attributes:
        namespace: where blocks are published.
        usage: where the tenant's blocks are counted.
        tokens: the prompt and what it was extended by, little-endian uint32 bytes; once extended, a bytearray.
        cached_tokens: tokens whose K/V exist already.
        block_ids: int32, all blocks of the tokens in order, and then those that are reserved. `commit` may exchange
            some for equal ones.
        num_published_blocks: the first so many of `block_ids` belong to the tree; the others are the lease's own.
        copy: a block copy that must be made before anything is written; the holder clears it when it is made.
        committed_tokens: tokens known to be matchable: the reused ones, and those published through this lease.
        written_from_tokens: the first token that it published itself; None until it publishes any.
        node: where the path that this lease pins ends; None while it pins nothing.
        node_used_s: when the node that was matched had been used before.
        is_closed: whether everything was given back.
        is_revoked: whether its namespace was purged; it publishes nothing more.
    """

    __slots__ = (
        "_leases",
        "block_ids",
        "cached_tokens",
        "committed_tokens",
        "copy",
        "is_closed",
        "is_revoked",
        "namespace",
        "node",
        "node_used_s",
        "num_published_blocks",
        "tokens",
        "usage",
        "written_from_tokens",
    )

    def __init__(
        self,
        leases: Leases,
        namespace: Namespace,
        usage: TenantUsage,
        tokens: bytes,
        cached_tokens: int,
        block_ids: BlockIds,
        num_published_blocks: int,
        copy: BlockCopy | None,
        node: Node | None,
        node_used_s: float,
    ) -> None:
        self._leases = leases
        self.namespace = namespace
        self.usage = usage
        self.tokens: bytes | bytearray = tokens
        self.cached_tokens = cached_tokens
        self.block_ids = block_ids
        self.num_published_blocks = num_published_blocks
        self.copy = copy
        self.node = node
        self.node_used_s = node_used_s
        self.committed_tokens = cached_tokens
        self.written_from_tokens: int | None = None
        self.is_closed = False
        self.is_revoked = False

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions included."""
        return len(self.tokens) // TOKEN_BYTES

    def commit(self, upto_tokens: int) -> int:
        """Publish what is finished: the K/V of all tokens before `upto_tokens` are written and final.

        Whole blocks are published, and the partly filled last one when `upto_tokens` is the end of the prompt. Blocks
        that somebody else published first are adopted, and the lease's own copies returned.

        Returns:
            Tokens that became matchable through this call; none once the namespace was purged.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `upto_tokens` is beyond the prompt.
        """
        return self._leases.commit(self, upto_tokens)

    def reserve(self, num_tokens: int) -> None:
        """Take the blocks for tokens that will come. A call that raises has changed nothing; see `extend`.

        If tokens are committed up to a position inside a block after this, the copy of that block takes a reserved one.

        Args:
            num_tokens: length to have blocks for, the tokens of now included.

        Raises:
            LeaseClosed: the lease is closed.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        self._leases.reserve(self, num_tokens)

    def extend(self, tokens: bytes) -> None:
        """Go on after the prompt: more tokens, and the blocks that they need. A call that raises has changed nothing.

        What was committed stays as it is: if it ends inside a block, that block is copied (`copy` says so), and the
        longer copy takes its place in the tree when it is committed.

            [abcd] [ef..]  both in the tree  ── extend by g ──▶  [abcd] [efg.]  the second is the lease's own

        Args:
            tokens: at least one, little-endian uint32 bytes.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        self._leases.extend(self, tokens)

    def close(self) -> None:
        """Give everything back; what was committed stays cached. Closing again does nothing."""
        self._leases.close(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
