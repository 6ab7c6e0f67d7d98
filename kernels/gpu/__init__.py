"""Triton kernels, and the plans that the host makes for them. Modules that import Triton are needed on a GPU only.

Public API: `paged_attention`, `plan_attention`, `linear`, `rms_norm`.
"""
