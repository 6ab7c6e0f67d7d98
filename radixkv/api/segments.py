"""Cached segments and stored namespaces, as operators see them: their size and their use, never their tokens."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.namespace import Namespace

HEAT_HALF_LIFE_S = 300.0


class Segment(NamedTuple):
    """A node of a radix tree at one moment. A plain tuple, because the engine's thread makes hundreds at a time.

    Attributes:
        place: a number that no other segment has while this one is cached.
        parent_place: that of the segment before it; None for the first one of its namespace.
        namespace: the isolation boundary that it belongs to; `adapter` is the one that computed its last token.
        start_token: tokens of the prompt before it.
        num_tokens: its own tokens.
        num_blocks: its own blocks.
        num_children: segments that continue it.
        num_uses: prompts that began with all of it, at the length that it had then. One that grows keeps its number;
            when one is split, both parts keep it, and the prompt that splits it counts for the first.
        idle_s: seconds since a prompt last began or ended here.
        heat: `num_uses + 1`, halved for each `HEAT_HALF_LIFE_S` in `idle_s`. No segment is hotter than its parent.
        num_leases: leases that keep it from eviction.
        priority: 0 to 100, what a retention gave it.
        is_retained: whether it counts as retained, by its own priority or by that of a later segment.
        expires_in_s: seconds until its priority ends; None for never.
    """

    place: int
    parent_place: int | None
    namespace: Namespace
    start_token: int
    num_tokens: int
    num_blocks: int
    num_children: int
    num_uses: int
    idle_s: float
    heat: float
    num_leases: int
    priority: int
    is_retained: bool
    expires_in_s: float | None


class SegmentPage(NamedTuple):
    """Some of the segments of a cache.

    Attributes:
        segments: the segments.
        next_place: where the next page begins; None after the last one.
        num_places: places that there are; at least as many as segments.
        num_segments: cached segments of all tenants.
        num_compared: segments that were looked at for this page, and that the caller asked for.
    """

    segments: tuple[Segment, ...]
    next_place: int | None
    num_places: int
    num_segments: int
    num_compared: int


class StoredNamespace(NamedTuple):
    """Blocks of a namespace in a store below the device.

    Attributes:
        namespace: the isolation boundary; `adapter` is the one that computed the blocks.
        num_blocks: whole blocks.
        num_retained_blocks: those of them that have a priority above the default and are not on the device.
    """

    namespace: Namespace
    num_blocks: int
    num_retained_blocks: int = 0


class StoredPage(NamedTuple):
    """Some of the namespaces of which a store holds blocks.

    Attributes:
        namespaces: those of the page.
        next_place: where the next page begins; None after the last one.
        num_compared: namespaces that were looked at for this page, and that the caller asked for.
        num_namespaces: namespaces of all tenants.
    """

    namespaces: tuple[StoredNamespace, ...]
    next_place: int | None
    num_compared: int
    num_namespaces: int
