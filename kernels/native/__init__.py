"""Kernels in C++ for processors with AVX2 or AVX-512. `library.py` says when there are any.

Public API: `load_library`, `NotCompiled`.
"""
