"""The standard health service of gRPC.

Face: `HealthServicer`.
"""
