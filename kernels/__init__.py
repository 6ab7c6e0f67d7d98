"""Attention, linear layers and the operations around them: for GPUs in Triton, and for CPUs in PyTorch and C++.

Kernels know nothing of the cache or of requests. `reference.py` defines what each kernel computes. Modules that import
Triton are needed on a GPU only.
"""
