"""Attacks on a server of its own, with an innocent caller beside them.

Face: `python -m bench.hostile`.
"""
