"""Eviction policies: the order in which unused leaves are evicted.

Face: `EvictionPolicy`, `make_policy`.
"""
