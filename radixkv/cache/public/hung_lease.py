"""A lease of a prompt that begins with a public prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.lease import Lease
from radixkv.cache.prompt_lease import PromptLease
from radixkv.cache.public.public_prefix import PublicPrefix, Trunk


class HungLease(PromptLease):
    """A lease in a tree that hangs below a public prefix, seen from the beginning of the prompt.

        tokens      [0 ......... trunk .........)[ .................... own ................... num_tokens)
        block_ids    of the public prefix        | shared with the tenant's requests | new, writable ......

    It changes nothing of the public prefix, which stays at least until this lease is closed.

    Args:
        tokens: the prompt.
        trunk: what it begins with.
        own: a lease of the tokens after that.
        leave: is told when the lease is closed.

    Attributes:
        tokens: the prompt and its extensions; a bytearray once it was extended.
    """

    __slots__ = ("_leave", "_own", "_trunk", "tokens")

    def __init__(self, tokens: bytes, trunk: Trunk, own: Lease, leave: Callable[[PublicPrefix], None]) -> None:
        self.tokens: bytes | bytearray = tokens
        self._own = own
        self._trunk = trunk
        self._leave = leave

    @property
    def own(self) -> Lease:
        """The lease of the tokens after the trunk."""
        return self._own

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions included."""
        return self._trunk.num_tokens + self._own.num_tokens

    @property
    def num_dropped_tokens(self) -> int:
        """None; see `PromptLease`."""
        return 0

    @property
    def cached_tokens(self) -> int:
        """Tokens whose K/V existed when the lease began."""
        return self._trunk.num_tokens + self._own.cached_tokens

    @property
    def public_tokens(self) -> int:
        """Tokens of `cached_tokens` that came from a public prefix."""
        return self._trunk.num_tokens + self._own.public_tokens

    @property
    def block_ids(self) -> BlockIds:
        """All blocks of the tokens in order, int32, and then those that are reserved. Complexity: a copy."""
        return np.concatenate((self._trunk.whole_block_ids, self._own.block_ids))

    @property
    def copy(self) -> BlockCopy | None:
        """A block copy to make before anything is written."""
        return self._own.copy

    @copy.setter
    def copy(self, copy: BlockCopy | None) -> None:
        self._own.copy = copy

    @property
    def committed_tokens(self) -> int:
        """Tokens known to be matchable."""
        return self._trunk.num_tokens + self._own.committed_tokens

    @property
    def written_from_tokens(self) -> int | None:
        """Position of the first token that this lease published; None until it publishes any."""
        start = self._own.written_from_tokens
        return None if start is None else self._trunk.num_tokens + start

    @property
    def num_nodes(self) -> int:
        """Nodes that were passed to find what is reused."""
        return self._own.num_nodes

    @property
    def is_revoked(self) -> bool:
        """Whether its namespace was purged; if so it publishes nothing more."""
        return self._own.is_revoked

    def commit(self, upto_tokens: int) -> int:
        """Publish finished blocks; see `Lease.commit`."""
        return self._own.commit(max(upto_tokens - self._trunk.num_tokens, min(0, upto_tokens)))

    def reserve(self, num_tokens: int) -> None:
        """Take blocks for tokens to come; see `Lease.reserve`."""
        self._own.reserve(num_tokens - self._trunk.num_tokens)

    def extend(self, tokens: bytes) -> None:
        """Add tokens to the end of the prompt; see `Lease.extend`."""
        self._own.extend(tokens)
        if isinstance(self.tokens, bytes):
            self.tokens = bytearray(self.tokens)  # appending to it does not copy the prompt for each token
        self.tokens += tokens

    def keep(self) -> None:
        """Do nothing more but keep the blocks until `close`; see `Lease.keep`."""
        self._own.keep()
        self.tokens = b""

    def close(self) -> None:
        """Give all blocks back. Closing again does nothing."""
        if not self._own.is_closed:
            self._own.close()
            self._leave(self._trunk.prefix)
