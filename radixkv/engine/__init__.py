"""The engine loop on its own thread: schedule, compute a step, publish, return results.

Public API: `Engine`, `Observer`.
"""
