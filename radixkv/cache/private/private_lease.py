"""A lease of a prompt that goes on in blocks of its own, which are never published."""

from __future__ import annotations

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.lease import Lease
from radixkv.cache.ledger import Ledger
from radixkv.cache.prompt_lease import PromptLease, close_unused
from radixkv.errors import CapacityError, InvariantViolation
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


class PrivateLease(PromptLease):
    """A lease of a prompt, and private blocks for what its holder keeps of it.

        until `leave_shared`   the lease of the prompt: matched, committed, shared
        afterwards             private blocks: the lease of the prompt is closed, and nothing is published any more

    Afterwards tokens and blocks are apart: `block_ids` hold the K/V of all tokens but `num_dropped_tokens`.

    Args:
        shared: the lease of the prompt. Closed with this one, or before.
        private: blocks that are in no tree. Closed with this one.
    """

    __slots__ = ("_num_dropped_tokens", "_own_tokens", "_private", "_shared")

    def __init__(self, shared: PromptLease, private: Lease) -> None:
        self._shared = shared
        self._private = private
        self._num_dropped_tokens = 0
        self._own_tokens: bytearray | None = None  # once the shared blocks are left

    @property
    def private_block_ids(self) -> BlockIds:
        """The private blocks, int32."""
        return self._private.block_ids

    @property
    def has_left_shared(self) -> bool:
        """Whether it holds nothing any more but its private blocks."""
        return self._own_tokens is not None

    @property
    def own(self) -> Lease:
        """The lease in the tree that this one publishes in; afterwards that of the private blocks."""
        return self._private if self.has_left_shared else self._shared.own

    @property
    def tokens(self) -> bytes | bytearray:
        """The prompt and its extensions, little-endian uint32 bytes."""
        return self._shared.tokens if self._own_tokens is None else self._own_tokens

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions and dropped ones included."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens whose K/V are not in the blocks any more."""
        return self._num_dropped_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens whose K/V existed when the lease began."""
        return self._shared.cached_tokens

    @property
    def public_tokens(self) -> int:
        """Tokens of `cached_tokens` that came from a public prefix."""
        return self._shared.public_tokens

    @property
    def block_ids(self) -> BlockIds:
        """The blocks that its holder reads and writes, int32."""
        return self._private.block_ids if self.has_left_shared else self._shared.block_ids

    @property
    def copy(self) -> BlockCopy | None:
        """A block copy to make before anything is written."""
        return None if self.has_left_shared else self._shared.copy

    @copy.setter
    def copy(self, copy: BlockCopy | None) -> None:
        if not self.has_left_shared:
            self._shared.copy = copy

    @property
    def committed_tokens(self) -> int:
        """Tokens known to be matchable when the shared blocks were left."""
        return self._shared.committed_tokens

    @property
    def written_from_tokens(self) -> int | None:
        """Position of the first token that this lease published; None if it published none."""
        return self._shared.written_from_tokens

    @property
    def num_nodes(self) -> int:
        """Nodes that were passed to find what is reused."""
        return self._shared.num_nodes

    @property
    def is_revoked(self) -> bool:
        """Whether its namespace was purged."""
        return self._shared.is_revoked or self._private.is_revoked

    def commit(self, upto_tokens: int) -> int:
        """Publish finished blocks of the prompt; see `Lease.commit`. Once the shared blocks are left, do nothing."""
        return 0 if self.has_left_shared else self._shared.commit(upto_tokens)

    def leave_shared(self, num_dropped_tokens: int) -> None:
        """Go on with the private blocks, into which what is kept was copied, and close the lease of the prompt.

        Args:
            num_dropped_tokens: tokens of the prompt whose K/V were not copied.
        """
        self._own_tokens = bytearray(self._shared.tokens)
        self._num_dropped_tokens = num_dropped_tokens
        self._shared.close()

    def drop_token(self) -> None:
        """Note that one more token's K/V are not in the blocks any more."""
        self._num_dropped_tokens += 1

    def reserve(self, num_tokens: int) -> None:
        """Take blocks for tokens to come, before the shared blocks are left. Afterwards there are enough."""
        if not self.has_left_shared:
            self._shared.reserve(num_tokens)

    def extend(self, tokens: bytes) -> None:
        """Add tokens to the end of the prompt. Once the shared blocks are left, this takes no blocks."""
        if self._own_tokens is None:
            self._shared.extend(tokens)
        else:
            self._own_tokens += tokens

    def keep(self) -> None:
        """Refuse: nobody else may hold private blocks.

        Raises:
            InvariantViolation: always.
        """
        raise InvariantViolation("private lease: expected to end with its request, got somebody who holds it")

    def close(self) -> None:
        """Give all blocks back. Closing again does nothing."""
        self._shared.close()
        self._private.close()


def with_private_blocks(ledger: Ledger, namespace: Namespace, shared: PromptLease, num_tokens: int) -> PromptLease:
    """Take private blocks beside the lease of a prompt. They count for its tenant as leased ones.

    Args:
        ledger: opened the lease.
        namespace: of the prompt.
        shared: the lease of the prompt. The result owns it; it is closed if there are too few blocks.
        num_tokens: entries for which there are to be blocks.

    Raises:
        OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
    """
    private = Lease(ledger, namespace, shared.own.usage, b"", 0, shared.own.block_ids[:0].copy(), 0, None, None, 0.0)
    ledger.open.add(private)
    try:
        private.reserve(num_tokens)
    except CapacityError:
        private.close()
        close_unused(shared)
        raise
    return PrivateLease(shared, private)
