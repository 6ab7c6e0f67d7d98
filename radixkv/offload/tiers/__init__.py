"""Stores of blocks outside the device: one interface, several stores, and objects that are verified when read.

Public API: `BlockStore`, `Tier`.
"""
