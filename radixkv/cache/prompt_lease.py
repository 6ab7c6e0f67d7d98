"""The right to use and write the blocks of a prompt, as its holder sees it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from radixkv.blocks import BlockCopy, BlockIds

if TYPE_CHECKING:
    from radixkv.cache.lease import Lease


class PromptLease(Protocol):
    """A lease, whatever the place in which it publishes. Positions count from the beginning of the prompt.

    `Lease` is one in a tree that begins with the prompt, and says what everything means; `HungLease` is one in a tree
    that hangs below a public prefix; `PrivateLease` goes on in blocks that are never published.
    """

    copy: BlockCopy | None

    @property
    def own(self) -> Lease:
        """The lease in the tree that this one publishes in."""

    @property
    def tokens(self) -> bytes | bytearray:
        """The prompt and its extensions, little-endian uint32 bytes."""

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions included."""

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens whose K/V are not in the blocks any more: 0, but for a `PrivateLease`."""

    @property
    def cached_tokens(self) -> int:
        """Tokens whose K/V existed when the lease began."""

    @property
    def public_tokens(self) -> int:
        """Tokens of `cached_tokens` that came from a public prefix."""

    @property
    def block_ids(self) -> BlockIds:
        """All blocks of the tokens in order, int32, and then those that are reserved."""

    @property
    def committed_tokens(self) -> int:
        """Tokens known to be matchable."""

    @property
    def written_from_tokens(self) -> int | None:
        """Position of the first token that this lease published; None until it publishes any."""

    @property
    def num_nodes(self) -> int:
        """Nodes that were passed to find what is reused."""

    @property
    def is_revoked(self) -> bool:
        """Whether its namespace was purged; if so it publishes nothing more."""

    def commit(self, upto_tokens: int) -> int:
        """Carry out `Lease.commit`."""

    def reserve(self, num_tokens: int) -> None:
        """Carry out `Lease.reserve`."""

    def extend(self, tokens: bytes) -> None:
        """Carry out `Lease.extend`."""

    def keep(self) -> None:
        """Carry out `Lease.keep`."""

    def close(self) -> None:
        """Carry out `Lease.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_unused(lease: PromptLease) -> None:
    """Close a lease whose request was not admitted in the end, as if it had not been: it is neither hit nor miss."""
    usage, cached_tokens = lease.own.usage, lease.cached_tokens
    usage.num_hit_tokens -= cached_tokens
    usage.num_miss_tokens -= lease.num_tokens - cached_tokens
    lease.close()
