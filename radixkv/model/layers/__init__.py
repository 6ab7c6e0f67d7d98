"""Products of a model on a CPU: each by the library that is fastest on this machine.

At load each shape of weight is tried with several libraries and layouts, with few rows and many. The model's linear
layers become products with the fastest one; in exact mode with the fastest whose rows have the same bits, and calls
have only the numbers of rows that were tried. `~/.cache/radixkv/gemms.json` remembers this for the machine, its
libraries and the number of threads. A packed weight is freed. One that is also an embedding is held twice.

Then norms, gated MLPs, attention and layers that are known run in few calls: see `FusedCpuLayers`.

Public API: `GemmTuner`, `Matmul`, `FusedCpuLayers`, `pack_linears`.
"""
