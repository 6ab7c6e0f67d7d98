"""Requests that wait for what a running request is computing, instead of computing it too."""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64

from radixkv.miss_reason import prefix_fingerprint
from radixkv.namespace import Namespace
from radixkv.request import Request
from radixkv.token_bytes import TOKEN_BYTES, shared_bytes


class _Lead(NamedTuple):
    """What a leader computes: its tokens, and the fingerprints of the prefixes that end with each of its blocks."""

    tokens: bytes
    fingerprints: list[int]


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
        # By the fingerprint of a prefix that ends with one of a leader's blocks: it finds a candidate, tokens decide.
        self._leaders: dict[Namespace, dict[int, Request]] = {}
        self._leads: dict[Request, _Lead] = {}
        self._waits: dict[Request, _Wait] = {}
        self._followers: dict[Request, list[Request]] = {}  # of each leader

    def has_leaders(self, namespace: Namespace) -> bool:
        """Whether anybody can be followed there."""
        return namespace in self._leaders

    def lead(self, request: Request) -> None:
        """Let others wait for what this request computes of its tokens now. Complexity: hashes them once."""
        lead = self._leads[request] = _Lead(request.tokens, self._fingerprints(request))
        blocks = self._leaders.setdefault(request.namespace, {})
        for fingerprint in lead.fingerprints:
            blocks.setdefault(fingerprint, request)
        self._followers[request] = []

    def follow(self, request: Request, cached_tokens: int) -> bool:
        """Let a request wait if somebody computes at least its next block, or all of what is left of it.

        Args:
            request: neither running nor waiting for another.
            cached_tokens: what it could reuse now.
        """
        blocks = self._leaders.get(request.namespace)
        if blocks is None:
            return False
        tokens = request.tokens
        next_end = (cached_tokens * TOKEN_BYTES // self._block_bytes + 1) * self._block_bytes
        fingerprint = prefix_fingerprint(request.namespace.seed, tokens, min(next_end, len(tokens)))
        leader = blocks.get(fingerprint)
        if leader is None:
            return False
        led = self._leads[leader].tokens
        shared = shared_bytes(tokens, led, 0)
        if shared < min(next_end, len(tokens)):
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
        blocks = self._leaders.get(request.namespace, {})
        for fingerprint in lead.fingerprints:
            if blocks.get(fingerprint) is request:  # and not one who leads the same prefix
                del blocks[fingerprint]
        if not blocks:
            self._leaders.pop(request.namespace, None)
        return freed

    def _release(self, leader: Request, upto_tokens: int) -> list[Request]:
        followers = self._followers.get(leader, [])
        freed = [follower for follower in followers if self._waits[follower].upto_tokens <= upto_tokens]
        if freed:
            self._followers[leader] = [each for each in followers if self._waits[each].upto_tokens > upto_tokens]
            for follower in freed:
                del self._waits[follower]
        return freed

    def _fingerprints(self, request: Request) -> list[int]:
        """Of the prefixes that end with each of its blocks, the last one as full as it is."""
        tokens, digest = memoryview(request.tokens), xxh3_64(seed=request.namespace.seed)
        fingerprints = []
        for start in range(0, len(tokens), self._block_bytes):
            digest.update(tokens[start : start + self._block_bytes])
            fingerprints.append(digest.intdigest())
        return fingerprints
