"""The loop on its own thread: admit, compute a step, publish, answer.

Face: `Engine`, `Observer`.
"""
