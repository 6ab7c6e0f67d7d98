"""Tokens that say where the next page of a listing begins."""

from __future__ import annotations

import re

from radixkv.errors import InvalidRequest

_TOKEN = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,12})")


def page_token(epoch: int, place: int | None) -> str:
    """Make the token of a place; none after the last page."""
    return "" if place is None else f"{epoch:x}-{place:x}"


def place_of(token: str, epoch: int) -> int:
    """Read where a page begins.

    Args:
        token: from the answer before; empty for the first page.
        epoch: of this start of the service.

    Raises:
        InvalidRequest: this service did not make the token since its start.
    """
    if not token:
        return 0
    found = _TOKEN.fullmatch(token)
    if found is None or int(found[1], 16) != epoch:
        raise InvalidRequest("page_token: expected one that this service made since its start, got another")
    return int(found[2], 16)
