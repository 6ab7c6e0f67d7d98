"""The attention function of a model, and the kernels behind it.

Face: `AttentionKernels`, `AttentionStep`.
"""
