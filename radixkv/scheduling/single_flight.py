"""Lets requests wait for tokens that a running request computes, instead of computing them too."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, shared_bytes


class _Lead(NamedTuple):
    """The tokens of a leader, and the fingerprint of the prefix that ends with its next block."""

    tokens: bytes
    fingerprint: int


class _Wait(NamedTuple):
    """The wait of a follower: it resumes when `leader` has published `upto_tokens`."""

    leader: Request
    upto_tokens: int


class SingleFlight:
    """Knows which running request computes a prefix, and which waiting ones follow it.

        leader      [ published | being computed ............. | its own )
        follower    [ cached ...|... waits for this ...........| its own )

    A leader is a running request that publishes after each chunk. It holds all its blocks, so it always makes progress,
    and a follower that computed the same tokens itself would not have them earlier. So waiting costs nothing.

    Where a model keeps states, a follower goes on at the end of the last whole block that it shares. It waits if the
    leader has not passed that yet, and the leader leaves a snapshot there.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        # By the fingerprint of the prefix that a leader publishes next. It finds a candidate; then tokens are compared.
        self._leaders: dict[int, Request] = {}
        self._first_blocks: Counter[tuple[Namespace, bytes]] = Counter()  # of leaders
        self._leads: dict[Request, _Lead] = {}
        self._waits: dict[Request, _Wait] = {}
        self._followers: dict[Request, list[Request]] = {}  # of each leader

    def has_leaders(self, request: Request) -> bool:
        """Whether a running request computes tokens that begin with the same block. Complexity: O(1)."""
        return self._first_block(request.namespace, request.tokens) in self._first_blocks

    def lead(self, request: Request) -> None:
        """Let others wait for the tokens that this request computes. Complexity: hashes its next block."""
        self._first_blocks[self._first_block(request.namespace, request.tokens)] += 1
        self._followers[request] = []
        self._lead_on(request, request.tokens, max(request.computed_upto, request.found_tokens))

    def follow(self, request: Request, cached_tokens: int, reusable_tokens: int | None = None) -> bool:
        """Let a request wait if a leader computes at least its next block, or all tokens that it has left.

        Args:
            request: neither running nor following.
            cached_tokens: tokens whose K/V are cached now.
            reusable_tokens: tokens that it could reuse now, fewer where a state is missing; None for all of these.

        Returns:
            Whether it waits now.
        """
        if not self.has_leaders(request):
            return False
        tokens = request.tokens
        next_end = self._next_end(tokens, cached_tokens)
        leader = self._leaders.get(prefix_fingerprint(request.namespace.seed, tokens, next_end))
        if leader is None or leader.namespace != request.namespace:
            return False
        led = self._leads[leader].tokens
        shared = shared_bytes(tokens, led, 0)
        if shared < next_end:
            return False
        # A part of a block is published with the whole block, or when the leader ends.
        upto = min(-(-shared // self._block_bytes) * self._block_bytes, len(led))
        usable = min(shared, len(tokens) - TOKEN_BYTES)  # each request computes its own last token
        if leader.state is not None:
            position = usable // self._block_bytes * self._block_bytes // TOKEN_BYTES
            reusable_tokens = cached_tokens if reusable_tokens is None else reusable_tokens
            if position <= max(reusable_tokens, leader.computed_upto) or not leader.state.want(position):
                return False
            upto = position * TOKEN_BYTES
        elif usable <= cached_tokens * TOKEN_BYTES:
            return False
        self._waits[request] = _Wait(leader, upto // TOKEN_BYTES)
        self._followers[leader].append(request)
        return True

    def published(self, leader: Request, upto_tokens: int) -> list[Request]:
        """Release the followers that have what they waited for. Returns them in the order in which they came."""
        lead = self._leads.get(leader)
        if lead is None:
            return []
        self._lead_no_more(leader, lead)
        if upto_tokens * TOKEN_BYTES < len(lead.tokens):
            self._lead_on(leader, lead.tokens, max(upto_tokens, leader.found_tokens))
        return self._release(leader, upto_tokens)

    def next_release(self, leader: Request) -> int | None:
        """Return the tokens that a leader has to publish until its first follower resumes; None without followers."""
        return min((self._waits[follower].upto_tokens for follower in self._followers.get(leader, ())), default=None)

    def leave(self, request: Request) -> list[Request]:
        """Forget a request that ended, or that publishes nothing more.

        Returns:
            Its followers. They follow no more.
        """
        wait = self._waits.pop(request, None)
        if wait is not None:
            self._followers[wait.leader].remove(request)
        lead = self._leads.pop(request, None)
        if lead is None:
            return []
        freed = self._release(request, len(lead.tokens) // TOKEN_BYTES)
        del self._followers[request]
        self._lead_no_more(request, lead)
        first_block = self._first_block(request.namespace, lead.tokens)  # its own tokens may have become more
        self._first_blocks[first_block] -= 1
        if not self._first_blocks[first_block]:
            del self._first_blocks[first_block]
        return freed

    def _lead_on(self, request: Request, tokens: bytes, from_tokens: int) -> None:
        fingerprint = prefix_fingerprint(request.namespace.seed, tokens, self._next_end(tokens, from_tokens))
        self._leads[request] = _Lead(tokens, fingerprint)
        self._leaders.setdefault(fingerprint, request)

    def _lead_no_more(self, request: Request, lead: _Lead) -> None:
        if self._leaders.get(lead.fingerprint) is request:  # not another one that leads the same prefix
            del self._leaders[lead.fingerprint]

    def _release(self, leader: Request, upto_tokens: int) -> list[Request]:
        followers = self._followers.get(leader, [])
        freed = [follower for follower in followers if self._waits[follower].upto_tokens <= upto_tokens]
        if freed:
            self._followers[leader] = [each for each in followers if self._waits[each].upto_tokens > upto_tokens]
            for follower in freed:
                del self._waits[follower]
        return freed

    def _first_block(self, namespace: Namespace, tokens: bytes) -> tuple[Namespace, bytes]:
        return namespace, tokens[: self._block_bytes]

    def _next_end(self, tokens: bytes, from_tokens: int) -> int:
        """Return the end in bytes of the block after `from_tokens`; the last block ends with the tokens."""
        next_end = (from_tokens * TOKEN_BYTES // self._block_bytes + 1) * self._block_bytes
        return min(next_end, len(tokens))
