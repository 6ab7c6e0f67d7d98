import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.kv_storage import KVShape, KVStorage

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_bytes_are_those_of_the_tensor() -> None:
    storage = KVStorage(5, 16, SHAPE, torch.device("cpu"))
    assert storage.pool.shape == (5, 3, 2, 2, 16, 8)
    assert storage.block_bytes * 5 == storage.pool.numel() * storage.pool.element_size()
    assert SHAPE.token_bytes == 3 * 2 * 2 * 8 * 2


def test_a_block_is_one_contiguous_region() -> None:
    storage = KVStorage(5, 16, SHAPE, torch.device("cpu"))
    assert storage.pool[3].is_contiguous()


def test_too_much_memory_is_refused_with_the_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match=r"cache\.capacity_tokens: .* tokens need 3377699720527872000 bytes"):
        KVStorage(2**40 * 1000, 16, SHAPE, torch.device("cpu"))
