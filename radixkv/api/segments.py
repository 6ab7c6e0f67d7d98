"""Cached segments and stored namespaces, as operators see them: size and use, but never tokens."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.api.awaits import Awaits
from radixkv.namespace import Namespace

HEAT_HALF_LIFE_S = 300.0


class Segment(NamedTuple):
    """A snapshot of a node of a radix tree. A plain tuple, because the engine's thread creates hundreds at a time.

    Attributes:
        number: a number that no other segment has while this one is cached.
        parent_number: the number of the previous segment; None for the first one of its namespace.
        namespace: its namespace; `adapter` is the one that computed its last token.
        start_token: number of prompt tokens before the segment.
        num_tokens: number of tokens of the segment.
        num_blocks: number of blocks of the segment.
        num_children: number of segments that continue this one.
        num_uses: number of prompts that contained the whole segment. A segment that grows keeps the number. After a
            split both parts keep it, and the prompt that caused the split counts for the first part.
        idle_s: seconds since a request last began or ended here.
        heat: `num_uses + 1`, halved for each `HEAT_HALF_LIFE_S` in `idle_s`. No segment is hotter than its parent,
            except on paths of more than 24 segments.
        num_leases: leases that keep it from eviction.
        priority: 0 to 100, set by a retention.
        is_retained: whether it counts as retained, because of its own priority or that of a later segment.
        expires_in_s: seconds until its priority expires; None for never.
        session_id: the session that is the only one to have used it; empty if there is none.
        awaits: what the session that last used it waits for.
    """

    number: int
    parent_number: int | None
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
    session_id: str
    awaits: Awaits


class SegmentPage(NamedTuple):
    """Some of the segments of a cache.

    Attributes:
        segments: the segments.
        next_start: the number at which the next page begins; None after the last one.
        end_number: the numbers of all segments are below it. Some numbers below it may belong to no segment.
        num_segments: cached segments of all tenants.
        num_compared: matching segments that were examined for this page.
    """

    segments: tuple[Segment, ...]
    next_start: int | None
    end_number: int
    num_segments: int
    num_compared: int


class StoredNamespace(NamedTuple):
    """The blocks of a namespace in a tier.

    Attributes:
        namespace: the namespace; `adapter` is the one that computed the blocks.
        num_blocks: whole blocks.
        num_retained_blocks: number of these blocks that have a priority above the default and are not on the device.
    """

    namespace: Namespace
    num_blocks: int
    num_retained_blocks: int = 0


class StoredPage(NamedTuple):
    """Some of the namespaces that have blocks in a tier.

    Attributes:
        namespaces: the namespaces of the page.
        next_start: where the next page begins; None after the last one.
        num_compared: matching namespaces that were examined for this page.
        num_namespaces: namespaces of all tenants.
    """

    namespaces: tuple[StoredNamespace, ...]
    next_start: int | None
    num_compared: int
    num_namespaces: int
