"""Estimates before a model is served: memory arithmetic, and traces replayed through the cache.

Face: `simulate`, `load_trace`, `DeviceMemory`.
"""
