"""GPU kernels and their pure-torch twins. Needs torch (and triton on a GPU); knows nothing of caches or requests.

Every kernel works on one block-major pool tensor

    pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]      # dim 2: 0 is K, 1 is V

so that a block is one contiguous region. `reference.py` states what each kernel means; the others are fast.
"""
