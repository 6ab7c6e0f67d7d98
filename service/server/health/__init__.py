"""The standard health service of gRPC.

Face: `HealthStatus`; `HealthServicer` and `add_health`, which need grpcio-health-checking.
"""
