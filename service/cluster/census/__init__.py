"""Calls that all replicas of a fleet answer, and their answers in one.

Face: `FleetCacheCalls`.
"""
