"""Parts of blocks: K/V of layers that need less of a prompt than the others.

Face: `PartGroups`, `PartPool`, `Reach`.
"""
