"""Calls of other threads to the engine's thread.

Face: `Inbox`, `Lane`.
"""
