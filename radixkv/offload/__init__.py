"""Offloading of K/V blocks that leave the device: to host memory, disk and shared stores, and back.

Face: `Offload`.
"""
