"""Which tier holds which block. Nothing here needs PyTorch.

Face: `OffloadIndex`, `TierIndex`.
"""
