"""Prompts computed on some replicas of a fleet, and answers generated on others.

Face: `HandOver`.
"""
