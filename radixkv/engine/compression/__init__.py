"""Generations that keep only some of their K/V.

Face: `Compressions`.
"""
