"""Opaque numbers and tokens for namespaces, segments and pages, which reveal nothing about other tenants."""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache

from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace

# One secret per process, so that a server that replaces another one in the same process accepts the page tokens of the
# first server and returns the same segment ids.
_SECRET = secrets.token_bytes(32)
_MAX_EXACT = 2**53 - 1  # the largest integer that every language represents exactly
_NAMESPACE_ID_BYTES = 6
_SEGMENT_ID_BYTES = 8
_POSITION_BYTES = 8
_TAG_BYTES = 8


class NamespaceIds:
    """Numbers of namespaces, made with a random secret, so that they do not confirm a guessed salt."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(16)

        @lru_cache(maxsize=4096)
        def number_of(namespace: Namespace) -> int:
            digest = hashlib.blake2b(key=secret, digest_size=_NAMESPACE_ID_BYTES)
            for field in namespace:
                data = field.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
            return int.from_bytes(digest.digest(), "little")

        self._number_of = number_of

    def of(self, namespace: Namespace) -> int:
        """Return the number of a namespace: 48 bits, equal for equal namespaces."""
        return self._number_of(namespace)


class SegmentIds:
    """Numbers of segments, which hide their positions, because positions are assigned in order over all tenants.

    Two of a million segments have the same number with a probability of 1 in 18,000.

    Args:
        secret: keys the digest.
    """

    def __init__(self, secret: bytes = _SECRET) -> None:
        self._secret = secret

    def of(self, position: int | None) -> int:
        """Return the number of the segment at a position: at least 1, and equal for equal positions; 0 for None."""
        if position is None:
            return 0
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=self._secret, digest_size=_SEGMENT_ID_BYTES)
        return 1 + int.from_bytes(digest.digest(), "little") % _MAX_EXACT


class PageTokens:
    """Page tokens of listings, which only this service can make or read.

    A plain position would reveal to a tenant how many segments the others have.

        token   [ tag: digest of the position )[ position, XORed with a digest of the tag )
                0                              8                                          16

    Args:
        epoch: epoch of the service; tokens of another epoch are refused.
        secret: keys both digests.
    """

    def __init__(self, epoch: int, secret: bytes = _SECRET) -> None:
        self._key = hashlib.blake2b(epoch.to_bytes(8, "little"), key=secret).digest()

    def token(self, position: int | None) -> str:
        """Return the token of the page that starts at a position; an empty string after the last page."""
        if position is None:
            return ""
        position_bytes = position.to_bytes(_POSITION_BYTES, "little")
        tag = self._tag(position_bytes)
        return (tag + self._xor_with_mask(position_bytes, tag)).hex()

    def position_of(self, token: str) -> int:
        """Return the position at which a page starts.

        Args:
            token: from the previous response; empty for the first page.

        Raises:
            InvalidRequest: this service did not make the token in its current epoch.
        """
        if not token:
            return 0
        try:
            data = bytes.fromhex(token)
        except ValueError:
            raise _invalid_token() from None
        tag, masked_position = data[:_TAG_BYTES], data[_TAG_BYTES:]
        position_bytes = self._xor_with_mask(masked_position, tag)
        if len(data) != _TAG_BYTES + _POSITION_BYTES or not secrets.compare_digest(tag, self._tag(position_bytes)):
            raise _invalid_token()
        return int.from_bytes(position_bytes, "little")

    def _tag(self, position_bytes: bytes) -> bytes:
        return hashlib.blake2b(position_bytes, key=self._key, digest_size=_TAG_BYTES, person=b"tag").digest()

    def _xor_with_mask(self, data: bytes, tag: bytes) -> bytes:
        """XOR the bytes of a position with a mask made from its tag. A second call reverses the first one."""
        mask = hashlib.blake2b(tag, key=self._key, digest_size=_POSITION_BYTES, person=b"mask").digest()
        return bytes(byte ^ mask_byte for byte, mask_byte in zip(data, mask, strict=False))


def _invalid_token() -> InvalidRequest:
    return InvalidRequest("page_token: this service did not make it, or has restarted since; start with the first page")
