"""Counts the tokens that a cache of infinite size would reuse."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from bench.parts.public_registration import PublicTokens
from bench.parts.workloads import WorkItem
from radixkv.tokens import TOKEN_BYTES, shared_bytes


def count_reusable_tokens(items: Sequence[WorkItem], public: PublicTokens | None = None) -> int:
    """Count the tokens that prompts, served one by one, share with an earlier prompt of their namespace.

    Public prefixes count as earlier than all prompts of their adapter. The last token of a prompt is always computed.
    In sorted order, the prompt with the longest common prefix is a neighbor.
    """
    earlier: dict[tuple[str, str], list[bytes]] = {}
    public_keys: defaultdict[str, list[bytes]] = defaultdict(list)
    for (adapter, _), tokens in (public or {}).items():
        insort(public_keys[adapter], tokens.astype(">u4").tobytes())
    num_reusable = 0
    for item in items:
        key = item.token_ids.astype(">u4").tobytes()
        earlier_keys = earlier.setdefault((item.tenant, item.adapter), public_keys[item.adapter].copy())
        position = bisect_left(earlier_keys, key)
        neighbors = earlier_keys[max(0, position - 1) : position + 1]
        shared_tokens = max((shared_bytes(neighbor, key, 0) // TOKEN_BYTES for neighbor in neighbors), default=0)
        num_reusable += min(shared_tokens, len(item.token_ids) - 1)
        insort(earlier_keys, key)
    return num_reusable
