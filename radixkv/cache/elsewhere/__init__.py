"""Blocks that left the device: which store has them, and which of them go first.

Face: `Elsewhere`, `Shelf`.
"""
