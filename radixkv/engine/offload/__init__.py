"""Blocks that leave the device are stored, and loaded again for requests that wait.

Public API: `Offload`.
"""
