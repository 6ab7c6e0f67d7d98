"""Radix trees: nodes, their children, and the match.

Face: `RadixTree`, `Node`.
"""
