"""The loop and its thread: admit, compute, publish, answer.

Face: `Engine`, `Observer`.
"""
