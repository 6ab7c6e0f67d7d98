"""Adapters as operators see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name, and the adapter that it stands for.

    Attributes:
        name: the name in requests. Of a draining adapter, the one that it had last.
        digest: of its content. Names with the same digest share cached tokens.
        rank: the largest rank of its matrices.
        num_bytes: memory of its weights.
        is_on_device: whether they are in the device's memory now, or else in the host's.
        is_draining: whether no name stands for it any more. New requests can't have it; those before go on.
        num_unfinished: requests that have it and are not over, under whatever name.
        cached_tokens: tokens that are cached with it, of all tenants.
    """

    name: str
    digest: str
    rank: int
    num_bytes: int
    is_on_device: bool
    is_draining: bool
    num_unfinished: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The outcome of a load.

    Attributes:
        adapter: what the name stands for now; `cached_tokens` is not counted.
        replaced_digest: what it stood for before; None if it stood for nothing. The same digest if nothing changed.
    """

    adapter: Adapter
    replaced_digest: str | None
