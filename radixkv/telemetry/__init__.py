"""Prometheus metrics and OpenTelemetry spans.

Public API: `Metrics`, `EngineGauges`, `Tracing`.
"""
