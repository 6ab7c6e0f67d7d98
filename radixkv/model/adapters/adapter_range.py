"""The rows of a step that are computed with an adapter."""

from __future__ import annotations

from typing import NamedTuple


class AdapterRange(NamedTuple):
    """Rows `[start, end)` of a step, and the digest of the adapter that they are computed with."""

    digest: str
    start: int
    end: int
