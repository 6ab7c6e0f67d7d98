"""The public prefixes of an engine: registered, computed and given up while requests run.

Face: `PublicRegistry`.
"""
