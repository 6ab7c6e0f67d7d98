"""Layers that keep a state per sequence, and the states that these layers read and write in a step.

Public API: `ShortConvs`.
"""
