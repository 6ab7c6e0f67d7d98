"""The prefix cache: radix trees over a pool of blocks, leases, retention and eviction.

It has no torch and no threads, and the clock is passed in.

Public API: `PrefixCache`, `Lease`, `Quota`.
"""
