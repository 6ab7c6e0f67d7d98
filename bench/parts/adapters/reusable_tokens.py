"""The tokens that an infinite cache would reuse, namespace by namespace."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from bench.parts.workloads import WorkItem
from radixkv.tokens import TOKEN_BYTES, shared_bytes


def count_reusable_tokens(items: Sequence[WorkItem]) -> int:
    """Count, for prompts served one after another, the tokens that they share with an earlier one of their namespace.

    The last token of a prompt is always computed. Among sorted prompts, the longest common prefix is with a neighbor.
    """
    earlier: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
    total = 0
    for item in items:
        key, known = item.token_ids.astype(">u4").tobytes(), earlier[item.tenant, item.adapter]
        place = bisect_left(known, key)
        neighbors = known[max(0, place - 1) : place + 1]
        shared = max((shared_bytes(other, key, 0) // TOKEN_BYTES for other in neighbors), default=0)
        total += min(shared, len(item.token_ids) - 1)
        insort(known, key)
    return total
