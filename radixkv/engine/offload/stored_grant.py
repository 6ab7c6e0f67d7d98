"""Retention of what stores have of a prompt, as its caller is told of it."""

from __future__ import annotations

from radixkv.api.retention import Grant, Retention
from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.cache.elsewhere.retentions import Wish
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


def grant_stored(
    elsewhere: Elsewhere,
    block_size: int,
    namespace: Namespace,
    tokens: bytes,
    retention: Retention,
    on_device: Grant,
    now_s: float,
) -> Grant:
    """Give what is stored of a prompt a priority, whatever it was before; shared stores know none.

    Args:
        elsewhere: knows what is stored.
        block_size: tokens a block.
        namespace, tokens: the prompt, as the cache knows it.
        retention: the priority and its range.
        on_device: what the cache granted of it.
        now_s: the time, by the cache's clock.

    Returns:
        What was granted in all.
    """
    start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
    cached = end - on_device.uncached_tokens
    end_kept = start + on_device.granted_tokens if on_device.refused_tokens else end  # no use behind a gap
    expires_s = None if retention.ttl_s is None else now_s + retention.ttl_s
    first, last, num_cached_blocks = start // block_size, -(-end_kept // block_size), cached // block_size
    wish = Wish(retention.priority, expires_s)
    num_granted, num_stored = elsewhere.retain(namespace, tokens, first, last, num_cached_blocks, wish)
    first = max(first, num_cached_blocks)
    stored = max(cached, min(end, (first + num_stored) * block_size)) - cached
    granted = max(cached, min(end, (first + num_granted) * block_size)) - cached
    return on_device._replace(uncached_tokens=0).joined(
        Grant(granted, stored - granted, end - cached - stored, expires_s if granted else None)
    )
