"""Loads, unloads and lists adapters for operators.

Face: `AdapterCalls`.
"""
