"""CPU kernels built from the operations of PyTorch, MKL and oneDNN. `radixkv.kernels.native` has those in C++.

Public API: `paged_attention`, `plan_cpu_attention`, `choose_gemm`.
"""
