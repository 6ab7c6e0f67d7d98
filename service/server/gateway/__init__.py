"""Gateway protocol: vLLM's engine protocol for the SMG gateway, served by the same engine.

Public API: `GatewayServicer`, `add_gateway`.
"""
