"""Adapters, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name, and the adapter that it maps to.

    Attributes:
        name: the name in requests; for a draining adapter, its last name.
        digest: digest of its content. Names with the same digest share cached tokens.
        rank: the largest rank of its matrices.
        num_bytes: memory of its weights.
        is_on_device: whether the weights are in device memory now; otherwise they are in host memory.
        is_draining: whether no name maps to it any more. New requests cannot use it; earlier ones continue.
        num_unfinished: unfinished requests that use it, under any name.
        cached_tokens: cached tokens that were computed with it, of all tenants.
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
    """The result of loading an adapter.

    Attributes:
        adapter: the adapter that the name maps to now; `cached_tokens` is not counted.
        replaced_digest: digest of the adapter that the name mapped to before; None if the name is new. Equal to
            `adapter.digest` if nothing changed.
    """

    adapter: Adapter
    replaced_digest: str | None
