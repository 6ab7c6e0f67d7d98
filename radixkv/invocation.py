"""Marks on tokens that an invoked adapter computes, which distinguish them from the base model's in the same tree."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from radixkv.errors import TooManyAdapters
from radixkv.tokens import TOKEN_BYTES

_ID_BITS = 20
MAX_INVOKED_VOCAB = 1 << _ID_BITS  # token ids below this value leave the upper bits free for a mark
MAX_INVOKED_ADAPTERS = (1 << (8 * TOKEN_BYTES - _ID_BITS)) - 1


class Invocation(NamedTuple):
    """The position in a prompt from which on an adapter computes the K/V. The base model computes the K/V before it.

        prompt   a b c d | I J x y        the adapter is invoked by I J
        marked   a b c d | I'J'x'y'       in the tree of the base model, where all requests find `a b c d`

    Attributes:
        digest: digest of the adapter's content.
        start: position of the first token that the adapter computes.
        mark: number that is added to the ids of all tokens from `start` on; see `InvocationMarks`.
    """

    digest: str
    start: int
    mark: int

    def marked(self, tokens: bytes) -> bytes:
        """Return a prompt's tokens as the cache knows them, little-endian uint32 bytes. Complexity: a copy."""
        ids = np.frombuffer(tokens, "<u4").copy()
        ids[self.start :] += np.uint32(self.mark)
        return ids.tobytes()


def strip_marks(tokens: bytes | bytearray) -> bytes:
    """Return tokens without their marks. Complexity: O(tokens); bytes without marks are returned without a copy."""
    ids = np.frombuffer(tokens, "<u4")
    if not ids.size or ids.max() < MAX_INVOKED_VOCAB:
        return bytes(tokens)
    return (ids & np.uint32(MAX_INVOKED_VOCAB - 1)).tobytes()


class InvocationMarks:
    """A mark for each invoked adapter: a unique number in the upper bits of a token id.

    Equal tokens that were computed with different weights therefore differ in the tree, and the tokens before an
    invocation are cached once for the base model and all its adapters.

    Marks belong to the content of adapters and are never reused, so an adapter that is loaded again finds its tokens
    that are still cached. Marks are only valid in this process. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[str, int] = {}  # by digest
        self._digests: dict[int, str] = {}  # by the number in the upper bits

    def add(self, digest: str) -> None:
        """Assign a mark to an adapter, if it has none.

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
                    "got one more"
                )
            self._digests[number] = digest
            self._marks[digest] = number << _ID_BITS

    def has(self, digest: str) -> bool:
        """Whether an adapter has a mark, which it keeps when it is unloaded."""
        return digest in self._marks

    def invocation(self, digest: str, start: int) -> Invocation:
        """Return the invocation of an adapter that has a mark."""
        return Invocation(digest, start, self._marks[digest])

    def digest_of(self, tokens: bytes) -> str:
        """Return the digest of the adapter that computed the last of these cached tokens; empty for the base model.

        All tokens after a marked one have the same mark, so a run of tokens is unmarked up to some position.
        """
        return self._digests.get(int.from_bytes(tokens[-TOKEN_BYTES:], "little") >> _ID_BITS, "")

    def num_plain(self, tokens: bytes) -> int:
        """Count the tokens before the first marked one. Complexity: O(1) if no token is marked, otherwise O(tokens)."""
        if not self.digest_of(tokens):
            return len(tokens) // TOKEN_BYTES
        return int((np.frombuffer(tokens, "<u4") >= MAX_INVOKED_VOCAB).argmax())
