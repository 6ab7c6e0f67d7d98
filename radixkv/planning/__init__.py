"""Estimates without a model: memory arithmetic, and traces replayed through the cache.

Public API: `simulate`, `load_trace`, `DeviceMemory`.
"""
