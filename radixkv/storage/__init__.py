"""Memory of the blocks: their layout, and the tensor that holds them.

Face: `HeadKV`, `LatentKV`, `KVShape`, `KVStorage`.
"""
