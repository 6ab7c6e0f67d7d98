"""The memory of K/V blocks: its layout, and its tensors.

Public API: `HeadKV`, `LatentKV`, `KVShape`, `KVStorage`.
"""
