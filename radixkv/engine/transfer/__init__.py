"""Transfer of K/V between servers.

Face: `Transfer`.
"""
