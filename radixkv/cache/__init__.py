"""Bookkeeping of blocks: trees, pool, leases, retention, eviction. No torch, no threads, and the clock is passed in.

Face: `PrefixCache`, `Lease`, `Quota`.
"""
