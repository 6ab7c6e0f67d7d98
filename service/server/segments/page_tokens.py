"""Tokens that say where the next page of a listing begins."""

from __future__ import annotations

import hashlib
import secrets

from radixkv.errors import InvalidRequest

# Of this process: a server that takes over from another one reads its tokens.
_SECRET = secrets.token_bytes(32)
_PLACE_BYTES = 8
_TAG_BYTES = 8


class PageTokens:
    """Makes tokens that nobody else can make or read: a place would tell a tenant how much others have.

        token   [ tag: digest of the place )[ place, hidden by a digest of the tag )
                0                           8                                      16

    Args:
        epoch: of this start of the service, with which tokens end.
        secret: goes into both digests.
    """

    def __init__(self, epoch: int, secret: bytes = _SECRET) -> None:
        self._key = hashlib.blake2b(epoch.to_bytes(8, "little"), key=secret).digest()

    def token(self, place: int | None) -> str:
        """Make the token of a place; an empty one after the last page."""
        if place is None:
            return ""
        plain = place.to_bytes(_PLACE_BYTES, "little")
        tag = self._tag(plain)
        return (tag + self._hidden(plain, tag)).hex()

    def place_of(self, token: str) -> int:
        """Read where a page begins.

        Args:
            token: from the answer before; empty for the first page.

        Raises:
            InvalidRequest: this service did not make the token since its start.
        """
        if not token:
            return 0
        try:
            data = bytes.fromhex(token)
        except ValueError:
            raise _foreign() from None
        tag, plain = data[:_TAG_BYTES], self._hidden(data[_TAG_BYTES:], data[:_TAG_BYTES])
        if len(data) != _TAG_BYTES + _PLACE_BYTES or not secrets.compare_digest(tag, self._tag(plain)):
            raise _foreign()
        return int.from_bytes(plain, "little")

    def _tag(self, plain: bytes) -> bytes:
        return hashlib.blake2b(plain, key=self._key, digest_size=_TAG_BYTES, person=b"tag").digest()

    def _hidden(self, data: bytes, tag: bytes) -> bytes:
        """Hide a place, or show a hidden one."""
        mask = hashlib.blake2b(tag, key=self._key, digest_size=_PLACE_BYTES, person=b"mask").digest()
        return bytes(one ^ other for one, other in zip(data, mask, strict=False))


def _foreign() -> InvalidRequest:
    return InvalidRequest("page_token: expected one that this service made since its start, got another")
