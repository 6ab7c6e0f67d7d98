"""C++ kernels for processors with AVX2 or AVX-512. `library.py` finds, compiles and loads them.

Public API: `load_library`, `NotCompiled`.
"""
