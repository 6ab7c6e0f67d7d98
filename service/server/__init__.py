"""The gRPC server of one engine, and its port for metrics.

Face: `Server`, `run`.
"""
