"""Mutated messages and raw connections, against a server of its own.

Face: `python -m bench.hostile.fuzz`.
"""
