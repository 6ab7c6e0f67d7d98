"""Numbers of segments that do not tell how many others there are."""

from __future__ import annotations

import hashlib
import secrets

# Of this process: a server that takes over from another one gives the same numbers.
_SECRET = secrets.token_bytes(32)
_ID_BYTES = 8
_MOST = 2**53 - 1  # a number that every language reads exactly


class SegmentIds:
    """Makes the number of a segment from its place: places are given in turn, whoever's the segments are.

    Two of a million segments have the same number once in 18,000 times.

    Args:
        secret: goes into the digest.
    """

    def __init__(self, secret: bytes = _SECRET) -> None:
        self._secret = secret

    def of(self, place: int | None) -> int:
        """Return the number of the segment at a place: the same for the same place, and not 0; 0 for none."""
        if place is None:
            return 0
        digest = hashlib.blake2b(place.to_bytes(8, "little"), key=self._secret, digest_size=_ID_BYTES).digest()
        return 1 + int.from_bytes(digest, "little") % _MOST
