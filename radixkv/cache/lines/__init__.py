"""The leaves that may be evicted, in the order in which they go.

Face: `EvictionLines`.
"""
