"""The service that the SMG gateway calls: vLLM's engine protocol over the same engine.

Face: `GatewayServicer`, `add_gateway`.
"""
