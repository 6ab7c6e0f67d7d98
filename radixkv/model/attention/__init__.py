"""The attention function of a model, and the kernels behind it.

Public API: `AttentionKernels`, `AttentionStep`.
"""
