"""Attention, linear layers and the operations around them: for GPUs in Triton, and for CPUs in PyTorch and C++.

They do not depend on caches and requests. `reference.py` defines what each kernel computes. Modules that import Triton
are needed on a GPU only.
"""
