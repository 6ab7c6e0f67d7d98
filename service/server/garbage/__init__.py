"""Garbage collection beside requests.

Face: `frozen_survivors`.
"""
