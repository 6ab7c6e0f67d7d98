"""Offloading of evicted K/V blocks to host memory, disk and shared stores, and loading them again.

Public API: `Offload`.
"""
