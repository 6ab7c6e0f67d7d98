"""Transfer of K/V between servers.

Public API: `Transfer`.
"""
