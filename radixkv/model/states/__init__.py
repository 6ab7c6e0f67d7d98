"""Layers that keep a state per sequence: the states that they read and write in a step.

Public API: `ShortConvs`.
"""
