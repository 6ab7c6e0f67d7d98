"""Triton kernels, and what the host plans for them. Only a GPU needs the modules that import Triton.

Public API: `paged_attention`, `plan_attention`, `linear`, `rms_norm`.
"""
