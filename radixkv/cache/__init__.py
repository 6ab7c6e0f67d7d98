"""Bookkeeping of blocks: trees, pool, leases, retention, eviction; the `Ledger` moves blocks between them.

It has no torch and no threads, and the clock is passed in.

Face: `PrefixCache`, `Lease`, `Quota`.
"""
