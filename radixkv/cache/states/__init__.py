"""Snapshots of states: the places of the tree from which a model that keeps a state can go on.

Face: `StateSlots`, `StateLease`.
"""
