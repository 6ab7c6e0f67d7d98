"""The memory of K/V blocks: the layout, and the tensors that hold them.

Public API: `HeadKV`, `LatentKV`, `KVShape`, `KVStorage`.
"""
