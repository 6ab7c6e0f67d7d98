"""Prometheus metrics and OpenTelemetry spans.

Face: `Metrics`, `EngineGauges`, `Tracing`.
"""
