"""Estimates before a model is served: memory arithmetic, and traces replayed through the cache.

Public API: `simulate`, `load_trace`, `DeviceMemory`.
"""
