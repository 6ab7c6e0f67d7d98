"""Loads, unloads and lists adapters for operators.

Public API: `AdapterCalls`.
"""
