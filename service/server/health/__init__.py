"""The standard health service of gRPC.

Public API: `HealthStatus`; `HealthServicer` and `add_health`, which need grpcio-health-checking.
"""
