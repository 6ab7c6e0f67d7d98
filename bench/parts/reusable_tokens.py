"""The tokens that an infinite cache would reuse, namespace by namespace."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from bench.parts.public_registration import PublicTokens
from bench.parts.workloads import WorkItem
from radixkv.tokens import TOKEN_BYTES, shared_bytes


def count_reusable_tokens(items: Sequence[WorkItem], public: PublicTokens | None = None) -> int:
    """Count, for prompts served one after another, the tokens that they share with an earlier one of their namespace.

    What is public is earlier than all prompts of its adapter. The last token of a prompt is always computed. Among
    sorted prompts, the longest common prefix is with a neighbor.
    """
    earlier: dict[tuple[str, str], list[bytes]] = {}
    public_keys: defaultdict[str, list[bytes]] = defaultdict(list)
    for (adapter, _), tokens in (public or {}).items():
        insort(public_keys[adapter], tokens.astype(">u4").tobytes())
    total = 0
    for item in items:
        key = item.token_ids.astype(">u4").tobytes()
        known = earlier.setdefault((item.tenant, item.adapter), public_keys[item.adapter].copy())
        place = bisect_left(known, key)
        neighbors = known[max(0, place - 1) : place + 1]
        shared = max((shared_bytes(other, key, 0) // TOKEN_BYTES for other in neighbors), default=0)
        total += min(shared, len(item.token_ids) - 1)
        insort(known, key)
    return total
