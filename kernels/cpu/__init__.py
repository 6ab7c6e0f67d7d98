"""CPU kernels built from the operations of PyTorch, MKL and oneDNN. `radixkv.kernels.native` has those in C++.

Public API: attention: `paged_attention`, `AttentionSpec`, `plan_cpu_attention`, `Group`; linear layers:
`gemm_backends`, `choose_gemm`, `GemmChoice`, `cold_copies`, `aligned_rows`, `adds_integers_exactly`, `quantize_rows`,
`Stopwatch`; batch-invariant rows: `RowTiles`, `tiles_of`, `in_tiles`, `in_row_pieces`, `row_norm`.
"""
