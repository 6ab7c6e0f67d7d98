"""The calls about public prefixes.

Face: `PublicCalls`.
"""
