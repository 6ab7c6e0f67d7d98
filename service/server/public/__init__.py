"""The calls about public prefixes.

Public API: `PublicCalls`.
"""
