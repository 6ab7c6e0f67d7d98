"""Garbage collection beside requests.

Public API: `frozen_survivors`.
"""
