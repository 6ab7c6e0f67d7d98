"""The service that the SMG gateway calls: vLLM's engine protocol over the same engine.

Public API: `GatewayServicer`, `add_gateway`.
"""
