"""Which tier holds which block. Nothing here needs PyTorch.

Public API: `OffloadIndex`, `TierIndex`.
"""
