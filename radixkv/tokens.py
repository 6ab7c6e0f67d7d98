"""Tokens as little-endian uint32 bytes, and the common prefix of two runs of tokens."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64

from radixkv.errors import InvalidRequest

TOKEN_BYTES = 4
_FIRST_WINDOW_TOKENS = 4096  # comparing this many tokens takes 2.6 us; comparing 100,000 at once takes 13 us


def require_tokens(tokens: bytes) -> None:
    """Check that `tokens` is one or more whole tokens.

    Raises:
        InvalidRequest: `tokens` is empty, or its length is not a multiple of four bytes.
    """
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise InvalidRequest(f"tokens: expected one or more uint32 token ids, got {len(tokens)} bytes")


def shared_bytes(segment: bytes, tokens: bytes, position: int) -> int:
    """Return the length in bytes of the common prefix of `segment` and `tokens[position:]`, in whole tokens.

    Complexity: one memory comparison if all of `segment` matches, otherwise O(common tokens + 4,096).

    Example:
        >>> shared_bytes(b"aaaabbbbcccc", b"....aaaabbbbxxxx", 4)
        8
    """
    if tokens.startswith(segment, position):
        return len(segment)
    # Usually the first tokens differ already. This check takes 0.1 us; the loop below would take 2 us.
    if segment[:TOKEN_BYTES] != tokens[position : position + TOKEN_BYTES]:
        return 0
    num_tokens = min(len(segment), len(tokens) - position) // TOKEN_BYTES
    start = 0
    window_tokens = _FIRST_WINDOW_TOKENS
    while start < num_tokens:
        num_compared = min(window_tokens, num_tokens - start)
        segment_ids = np.frombuffer(segment, np.uint32, num_compared, start * TOKEN_BYTES)
        prompt_ids = np.frombuffer(tokens, np.uint32, num_compared, position + start * TOKEN_BYTES)
        is_different = segment_ids != prompt_ids
        first_difference = int(is_different.argmax())
        if is_different[first_difference]:
            return (start + first_difference) * TOKEN_BYTES
        start += num_compared
        window_tokens *= 8
    return num_tokens * TOKEN_BYTES


def prefix_fingerprint(seed: int, tokens: bytes, end: int, more: bytes = b"") -> int:
    """Hash the first `end` bytes of `tokens`, followed by the bytes `more`, under a namespace's seed."""
    digest = xxh3_64(memoryview(tokens)[:end], seed)
    digest.update(more)
    return digest.intdigest()
