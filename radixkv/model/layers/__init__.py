"""Faster layers in place of those of transformers: linear layers with prepacked or merged weights, and fused layers.

On a CPU several GEMM libraries and weight layouts are tried at load for each shape of weight, with few rows and with
many. Linear layers use the fastest; in exact mode the fastest one that is batch-invariant, called only with row counts
that were checked unless any row count is safe. The file `gemms.json` in the cache directory keeps the choices for this
machine, its libraries and the number of threads. A weight is freed after it was packed. A weight that is also an
embedding is stored twice, unless it stays quantized. Known norms, gated MLPs, attention and whole layers are then
fused: see `FusedCpuLayers` and `FusedGpuLayers`.

Public API: `GemmTuner`, `Matmul`, `FusedCpuLayers`, `pack_linears`.
"""
