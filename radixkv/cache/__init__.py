"""The prefix cache: radix trees over a pool of blocks, leases, retention and eviction.

It does not import torch, has no threads, and reads the time from a clock that is passed in.

Public API: `PrefixCache`, `Lease`, `Quota`.
"""
