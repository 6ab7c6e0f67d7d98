"""Stores of blocks whose K/V left the device: one seam, several stores, and objects that prove what they are.

Public API: `BlockStore`, `Tier`, `BlockKeys`, `ThreadedStore`.
"""
