"""Memory of the blocks: their layout, and the tensor that holds them.

Public API: `HeadKV`, `LatentKV`, `KVShape`, `KVStorage`.
"""
