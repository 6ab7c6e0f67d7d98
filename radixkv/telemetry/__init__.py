"""Metrics, gauges and spans for operators.

Face: `Metrics`, `EngineGauges`, `Tracing`.
"""
