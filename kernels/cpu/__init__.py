"""Kernels for a CPU, made of PyTorch's and oneDNN's operations. `radixkv.kernels.native` has those in C++.

Public API: `paged_attention`, `plan_cpu_attention`, `choose_gemm`.
"""
