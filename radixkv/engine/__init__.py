"""The engine loop on its own thread: schedule, compute a step, publish, return results.

Face: `Engine`, `Observer`.
"""
