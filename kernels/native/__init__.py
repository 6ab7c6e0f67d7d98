"""C++ kernels for processors with AVX2 or AVX-512. `library.py` finds, compiles and loads them.

Public API: libraries: `load_library`, `compile_kernels`, `is_current`, `library_name`, `digest_of`, `NotCompiled`,
`Variant`, `processor_facts`; linear layers: `Panels`, `QuantizedPanels`; attention: `plan_work`, `AttentionWork`,
`Attention`, `Queries`, `supports`; layers: `NativeRows`, `NativeNorm`, `NativeLayers`, `LayerParts`, `Weights`,
`KVView`; copies: `NativeCopies`, `ObjectFiles`.
"""
