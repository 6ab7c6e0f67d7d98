"""Layers that keep a state for each sequence: what they read and leave in a step.

Public API: `ShortConvs`.
"""
