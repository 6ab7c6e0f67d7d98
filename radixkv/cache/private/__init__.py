"""Blocks of one request that nobody else ever uses.

Face: `with_private_blocks`, `PrivateLease`.
"""
