"""Single flight: requests wait for tokens that a running request computes, instead of computing them as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, shared_bytes


class _Lead(NamedTuple):
    """The tokens of a leader, and the fingerprint of the prefix that ends with its next block."""

    tokens: bytes
    fingerprint: int


class _Wait(NamedTuple):
    """The condition of a follower: it resumes when `leader` has published `upto_tokens`."""

    leader: Request
    upto_tokens: int


class SingleFlight:
    """Keeps track of the running requests that compute a prefix (leaders), and of the waiting ones that follow them.

        leader      [ published | being computed ............. | its own )
        follower    [ cached ...|... waits for this ...........| its own )

    A leader is a running request that publishes after each chunk. It holds the blocks that its next steps need, so it
    makes progress, and a follower that computed the same tokens itself would not have them earlier. So following costs
    no time.

    For a model with recurrent states, a follower resumes at the end of the last whole block that it shares. It waits if
    the leader has not passed that position yet; the leader then saves a snapshot of its state there.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        # By the fingerprint of the prefix that a leader publishes next. Tokens are compared before a request follows.
        self._leaders: dict[int, Request] = {}
        self._first_blocks: Counter[tuple[Namespace, bytes]] = Counter()  # leaders by their first block of tokens
        self._leads: dict[Request, _Lead] = {}
        self._waits: dict[Request, _Wait] = {}
        self._followers: dict[Request, list[Request]] = {}  # of each leader

    def has_leaders(self, request: Request) -> bool:
        """Whether a running request computes tokens that begin with the same block. Complexity: O(1)."""
        if not self._first_blocks:
            return False
        return (request.namespace, request.tokens[: self._block_bytes]) in self._first_blocks

    def lead(self, request: Request) -> None:
        """Let other requests follow this one while it computes its tokens. Complexity: a hash of the prefix."""
        tokens = request.tokens
        self._first_blocks[request.namespace, tokens[: self._block_bytes]] += 1
        self._set_lead(request, tokens, max(request.computed_upto, request.found_tokens))

    def follow(self, request: Request, cached_tokens: int, reusable_tokens: int) -> bool:
        """Make a request wait if a leader computes at least the request's next block, or all tokens that it has left.

        Args:
            request: neither running nor following.
            cached_tokens: tokens whose K/V are cached now.
            reusable_tokens: tokens that it could reuse now: fewer than `cached_tokens` if a state snapshot is missing.

        Returns:
            Whether it waits now.
        """
        if not self._first_blocks:
            return False
        tokens = request.tokens
        if (request.namespace, tokens[: self._block_bytes]) not in self._first_blocks:
            return False
        next_end = self._next_end(tokens, cached_tokens)
        leader = self._leaders.get(prefix_fingerprint(request.namespace.seed, tokens, next_end))
        if leader is None or leader.namespace != request.namespace:
            return False
        leader_tokens = self._leads[leader].tokens
        num_shared_bytes = shared_bytes(tokens, leader_tokens, 0)
        if num_shared_bytes < next_end:
            return False
        # A leader publishes whole blocks, and its last partial block at its end.
        upto_bytes = min(-(-num_shared_bytes // self._block_bytes) * self._block_bytes, len(leader_tokens))
        # Each request computes its own last token.
        num_usable_bytes = min(num_shared_bytes, len(tokens) - TOKEN_BYTES)
        if leader.state_lease is not None:
            snapshot_bytes = num_usable_bytes // self._block_bytes * self._block_bytes
            position = snapshot_bytes // TOKEN_BYTES
            is_position_passed = position <= max(reusable_tokens, leader.computed_upto)
            if is_position_passed or not leader.state_lease.request_snapshot(position):
                return False
            upto_bytes = snapshot_bytes
        elif num_usable_bytes <= cached_tokens * TOKEN_BYTES:
            return False
        self._waits[request] = _Wait(leader, upto_bytes // TOKEN_BYTES)
        self._followers.setdefault(leader, []).append(request)
        return True

    def record_published(self, leader: Request, upto_tokens: int) -> list[Request]:
        """Record that a leader has published its first `upto_tokens` tokens.

        Returns:
            The followers that can resume, in the order in which they began to follow.
        """
        lead = self._leads.get(leader)
        if lead is None:
            return []
        self._stop_leading(leader, lead)
        if upto_tokens * TOKEN_BYTES < len(lead.tokens):
            self._set_lead(leader, lead.tokens, max(upto_tokens, leader.found_tokens))
        return self._release(leader, upto_tokens)

    def next_release(self, leader: Request) -> int | None:
        """Return how many tokens a leader must have published until a follower resumes; None without followers."""
        return min((self._waits[follower].upto_tokens for follower in self._followers.get(leader, ())), default=None)

    def leave(self, request: Request) -> list[Request]:
        """Forget a request that ended, or that publishes nothing more.

        Returns:
            Its followers, which no longer follow it.
        """
        wait = self._waits.pop(request, None)
        if wait is not None:
            self._remove_followers(wait.leader, {request})
        lead = self._leads.pop(request, None)
        if lead is None:
            return []
        released = self._release(request, len(lead.tokens) // TOKEN_BYTES)
        self._stop_leading(request, lead)
        # As when it began to lead: the first block of `request.tokens` may contain generated tokens by now.
        first_block = request.namespace, lead.tokens[: self._block_bytes]
        self._first_blocks[first_block] -= 1
        if not self._first_blocks[first_block]:
            del self._first_blocks[first_block]
        return released

    def _set_lead(self, request: Request, tokens: bytes, from_tokens: int) -> None:
        """Register a leader by the prefix that ends with its next block."""
        next_end = self._next_end(tokens, from_tokens)
        fingerprint = prefix_fingerprint(request.namespace.seed, tokens, next_end)
        self._leads[request] = _Lead(tokens, fingerprint)
        self._leaders.setdefault(fingerprint, request)

    def _stop_leading(self, request: Request, lead: _Lead) -> None:
        if self._leaders.get(lead.fingerprint) is request:  # another request may lead the same prefix
            del self._leaders[lead.fingerprint]

    def _release(self, leader: Request, upto_tokens: int) -> list[Request]:
        followers = self._followers.get(leader)
        if not followers:
            return []
        released = [follower for follower in followers if self._waits[follower].upto_tokens <= upto_tokens]
        if released:
            self._remove_followers(leader, set(released))
            for follower in released:
                del self._waits[follower]
        return released

    def _remove_followers(self, leader: Request, removed: Container[Request]) -> None:
        followers = [follower for follower in self._followers[leader] if follower not in removed]
        if followers:
            self._followers[leader] = followers
        else:
            del self._followers[leader]

    def _next_end(self, tokens: bytes, from_tokens: int) -> int:
        """Return the end, in bytes, of the block after `from_tokens`; the last block ends with the tokens."""
        next_end = (from_tokens * TOKEN_BYTES // self._block_bytes + 1) * self._block_bytes
        return min(next_end, len(tokens))
