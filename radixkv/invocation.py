"""Marks on the tokens that an invoked adapter computes, by which they are told from the base model's in one tree."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from radixkv.errors import TooManyAdapters
from radixkv.tokens import TOKEN_BYTES

_ID_BITS = 20
MAX_INVOKED_VOCAB = 1 << _ID_BITS  # token ids below it leave room for a mark
MAX_INVOKED_ADAPTERS = (1 << (8 * TOKEN_BYTES - _ID_BITS)) - 1


class Invocation(NamedTuple):
    """The place in a prompt from which on an adapter computes it. K and V before that are the base model's.

        prompt   a b c d | I J x y        the adapter is invoked by I J
        marked   a b c d | I'J'x'y'       in the tree of the base model, where `a b c d` is found by all

    Attributes:
        digest: of the adapter's content.
        start: position of its first token.
        mark: what is added to the ids of its tokens; see `InvocationMarks`.
    """

    digest: str
    start: int
    mark: int

    def marked(self, tokens: bytes) -> bytes:
        """Return a prompt's tokens as the cache knows them, little-endian uint32 bytes. Complexity: a copy."""
        ids = np.frombuffer(tokens, "<u4").copy()
        ids[self.start :] += np.uint32(self.mark)
        return ids.tobytes()


def plain(tokens: bytes | bytearray) -> bytes:
    """Return tokens without their marks. Complexity: a copy."""
    return (np.frombuffer(tokens, "<u4") & np.uint32(MAX_INVOKED_VOCAB - 1)).tobytes()


class InvocationMarks:
    """A mark for each invoked adapter: a number in the upper bits of a token id, which no other content ever has.

    So tokens that look alike and were computed with different weights differ for the tree, to the token, and what comes
    before an invocation is cached once for the base model and all of its adapters.

    Marks are given by content and never taken back: an adapter that is loaded again finds what is still cached. They
    mean nothing outside this process. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[str, int] = {}  # by digest
        self._digests: dict[int, str] = {}  # by the number in the upper bits

    def add(self, digest: str) -> None:
        """Give an adapter a mark, if it has none.

        Raises:
            TooManyAdapters: there are no more marks.
        """
        with self._lock:
            if digest in self._marks:
                return
            number = len(self._marks) + 1
            if number > MAX_INVOKED_ADAPTERS:
                raise TooManyAdapters(
                    f"adapters: expected at most {MAX_INVOKED_ADAPTERS} different invoked ones until the next start, "
                    f"got one more"
                )
            self._digests[number] = digest
            self._marks[digest] = number << _ID_BITS

    def has(self, digest: str) -> bool:
        """Whether an adapter has a mark, now or once."""
        return digest in self._marks

    def invocation(self, digest: str, start: int) -> Invocation:
        """Return the invocation of an adapter that has a mark."""
        return Invocation(digest, start, self._marks[digest])

    def digest_of(self, tokens: bytes) -> str:
        """Return the digest of the adapter that computed the last one of cached tokens; empty for the base model.

        All after a marked token on a path is marked alike, so a run of tokens is plain up to some point, or all of it.
        """
        return self._digests.get(int.from_bytes(tokens[-TOKEN_BYTES:], "little") >> _ID_BITS, "")

    def num_plain(self, tokens: bytes) -> int:
        """Count the tokens before the first marked one. Complexity: O(1) if none is marked, otherwise O(tokens)."""
        if not self.digest_of(tokens):
            return len(tokens) // TOKEN_BYTES
        return int((np.frombuffer(tokens, "<u4") >= MAX_INVOKED_VOCAB).argmax())
