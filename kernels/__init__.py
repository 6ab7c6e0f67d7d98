"""Triton kernels for GPUs, and torch functions that compute the same. They do not depend on caches and requests.

All of them work on one block-major pool (`kv_pool.py`), in which a block is one contiguous region. `reference.py`
defines what each kernel computes. Modules that import Triton are needed on a GPU only.
"""
