"""GPU kernels and their pure-torch twins. Needs torch (and triton on a GPU); knows nothing of caches or requests.

Every kernel works on one block-major pool (`kv_pool.py`), so that a block is one contiguous region. `reference.py`
states what each kernel means; the others are fast.
"""
