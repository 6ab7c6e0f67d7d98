"""The gRPC server of one engine, and its port for metrics.

Public API: `Server`, `run`.
"""
