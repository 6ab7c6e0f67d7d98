"""Requests that wait for what a running request is computing, instead of computing it too."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, shared_bytes


class _Lead(NamedTuple):
    """What a leader computes: its tokens, and the fingerprint of the prefix that ends with its next block."""

    tokens: bytes
    fingerprint: int


class _Wait(NamedTuple):
    """A follower resumes when its leader has published `upto_tokens`."""

    leader: Request
    upto_tokens: int


class SingleFlight:
    """Who computes a prefix, and who follows.

        leader      [ published | being computed ............. | its own )
        follower    [ cached ...|... waits for this ...........| its own )

    A leader is a running request that publishes chunk by chunk. It holds all its blocks, so it always gets on, and it
    is never behind where a follower would be that computed the same tokens after it: to wait costs nothing.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        # By the fingerprint of the prefix that a leader publishes next: it finds a candidate, tokens decide.
        self._leaders: dict[int, Request] = {}
        self._first_blocks: Counter[tuple[Namespace, bytes]] = Counter()  # of leaders
        self._leads: dict[Request, _Lead] = {}
        self._waits: dict[Request, _Wait] = {}
        self._followers: dict[Request, list[Request]] = {}  # of each leader

    def has_leaders(self, request: Request) -> bool:
        """Whether anybody computes tokens that begin with the same block. Complexity: O(1)."""
        return self._first_block(request.namespace, request.tokens) in self._first_blocks

    def lead(self, request: Request) -> None:
        """Let others wait for what this request computes of its tokens now. Complexity: hashes its first tokens."""
        self._first_blocks[self._first_block(request.namespace, request.tokens)] += 1
        self._followers[request] = []
        self._lead_on(request, request.tokens, request.computed_upto)

    def follow(self, request: Request, cached_tokens: int) -> bool:
        """Let a request wait if somebody computes at least its next block, or all of what is left of it.

        Args:
            request: neither running nor waiting for another.
            cached_tokens: what it could reuse now.
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
        # What is shared of a block is published with the block, or with the leader's end.
        upto = min(-(-shared // self._block_bytes) * self._block_bytes, len(led))
        if min(shared, len(tokens) - TOKEN_BYTES) <= cached_tokens * TOKEN_BYTES:
            return False  # its last token is its own to compute
        self._waits[request] = _Wait(leader, upto // TOKEN_BYTES)
        self._followers[leader].append(request)
        return True

    def published(self, leader: Request, upto_tokens: int) -> list[Request]:
        """The followers that have what they waited for, in the order in which they came. They follow no more."""
        lead = self._leads.get(leader)
        if lead is None:
            return []
        self._lead_no_more(leader, lead)
        if upto_tokens * TOKEN_BYTES < len(lead.tokens):
            self._lead_on(leader, lead.tokens, upto_tokens)
        return self._release(leader, upto_tokens)

    def next_release(self, leader: Request) -> int | None:
        """How far a leader has to publish until the first of its followers resumes; None without followers."""
        return min((self._waits[follower].upto_tokens for follower in self._followers.get(leader, ())), default=None)

    def leave(self, request: Request) -> list[Request]:
        """Forget a request that ended, or that publishes nothing more.

        Returns:
            Its followers: they have to see for themselves.
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
        first_block = self._first_block(request.namespace, lead.tokens)  # its own may have become longer
        self._first_blocks[first_block] -= 1
        if not self._first_blocks[first_block]:
            del self._first_blocks[first_block]
        return freed

    def _lead_on(self, request: Request, tokens: bytes, from_tokens: int) -> None:
        fingerprint = prefix_fingerprint(request.namespace.seed, tokens, self._next_end(tokens, from_tokens))
        self._leads[request] = _Lead(tokens, fingerprint)
        self._leaders.setdefault(fingerprint, request)

    def _lead_no_more(self, request: Request, lead: _Lead) -> None:
        if self._leaders.get(lead.fingerprint) is request:  # and not one who leads the same prefix
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
        """Bytes up to the end of the block that comes after so many tokens, the last one as full as it is."""
        next_end = (from_tokens * TOKEN_BYTES // self._block_bytes + 1) * self._block_bytes
        return min(next_end, len(tokens))
