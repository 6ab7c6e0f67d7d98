"""Blocks that left the device: which store has them, and which of them go first.

Public API: `Elsewhere`, `Shelf`.
"""
