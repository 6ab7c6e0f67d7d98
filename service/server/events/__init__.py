"""Events of what is cached, for routers: a gRPC service, and a ZMQ publisher while the service runs.

Public API: `EventServicer`, `publishing`.
"""
