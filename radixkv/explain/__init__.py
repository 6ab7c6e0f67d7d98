"""Explains why a prompt is not reused: compares it with the cached branch that it resembles most.

It has no cache, no engine and no torch: `radixkv.cache.branches` finds the branches.

Public API: `explain`.
"""
