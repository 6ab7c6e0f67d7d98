import pytest
import torch

from radixkv.config import KV_DTYPES
from radixkv.errors import ConfigError
from radixkv.storage.device_pool import KVHeads, KVShape, KVStorage
from radixkv.storage.kv_layout import LatentKV

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LATENT = KVShape(num_layers=3, num_kv_heads=1, head_dim=576, dtype=torch.bfloat16, is_latent=True)
LATENT_DTYPES = [each for each in KV_DTYPES if each != "k8v4"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kv_dtype", "shape"), [*((each, SHAPE) for each in KV_DTYPES), *((each, LATENT) for each in LATENT_DTYPES)]
)
def test_bytes_are_those_of_the_tensor(kv_dtype: str, shape: KVShape) -> None:
    storage = KVStorage(5, 16, shape.stored_as(kv_dtype), CPU)
    pool = storage.pool
    scale_bytes = 0 if pool.scales is None else pool.scales.nbytes
    assert storage.block_bytes == pool.blocks[0].nbytes
    assert pool.values.nbytes + scale_bytes == pool.blocks.nbytes == 5 * storage.block_bytes


# Bytes of a vector of 8 numbers: bfloat16, or 8 bits per number and a scale of 4 bytes; k8v4 has 8 bits per number of
# keys, and 4 of values, so that the mean is 6 bytes.
@pytest.mark.parametrize(
    ("kv_dtype", "vector_bytes"), [("auto", 2 * 8), ("fp8", 8 + 4), ("int8", 8 + 4), ("k8v4", 6 + 4)]
)
def test_a_token_has_two_vectors_per_layer_and_head(kv_dtype: str, vector_bytes: int) -> None:
    assert SHAPE.stored_as(kv_dtype).token_bytes == 3 * 2 * 2 * vector_bytes


@pytest.mark.parametrize("kv_dtype", LATENT_DTYPES)
def test_a_latent_token_has_the_bytes_that_a_plan_counts(kv_dtype: str) -> None:
    shape = LATENT.stored_as(kv_dtype)
    assert shape.token_bytes == LatentKV(3, rank=512, rope_dim=64).token_bytes(shape.format)
    if kv_dtype in ("auto", "bf16"):
        assert shape.token_bytes == 3 * 576 * 2


@pytest.mark.parametrize(("kv_dtype", "min_ratio"), [("fp8", 1.9), ("int8", 1.9), ("k8v4", 2.5)])
def test_quantization_makes_room_for_more_tokens_if_heads_have_128_dimensions(kv_dtype: str, min_ratio: float) -> None:
    shape = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert shape.token_bytes / shape.stored_as(kv_dtype).token_bytes >= min_ratio


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "message"),
    [
        (7, torch.float32, "k8v4", "expected an even head_dim for k8v4, got 7"),
        (8, torch.float16, "bf16", "expected a model in float32 or bfloat16 for bf16, got float16"),
    ],
)
def test_a_dtype_that_does_not_fit_the_model_is_refused(
    head_dim: int, dtype: torch.dtype, kv_dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^cache\.kv_dtype: {message}$"):
        KVShape(1, 1, head_dim, dtype).stored_as(kv_dtype)


def test_too_much_memory_is_refused_with_the_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match=r"cache\.capacity_tokens: .* tokens need 3377699720527872000 bytes"):
        KVStorage(2**40 * 1000, 16, SHAPE, CPU)


def test_layers_of_different_heads_add_up() -> None:
    shape = KVShape.of_layers([KVHeads(8, 256), KVHeads(2, 512), KVHeads(8, 256)], torch.bfloat16)
    assert shape.token_bytes == 2 * 2 * (8 * 256 * 2 + 2 * 512)
    assert shape.of((0, 2)) == KVShape(2, 8, 256, torch.bfloat16)
    assert shape.of(()).token_bytes == 0
    assert shape.stored_as("int8").token_bytes == 2 * (2 * 8 * (256 + 4) + 2 * (512 + 4))
    uniform = KVShape.of_layers([KVHeads(2, 8)] * 3, torch.bfloat16)
    assert uniform == KVShape(3, 2, 8, torch.bfloat16)
    assert uniform.layers_by_heads == ((0, 1, 2),)


def test_k8v4_needs_an_even_size_in_every_layer() -> None:
    with pytest.raises(ConfigError, match="expected an even head_dim for k8v4, got 7"):
        KVShape.of_layers([KVHeads(2, 8), KVHeads(2, 7)], torch.float32).stored_as("k8v4")


def test_k8v4_is_refused_for_latents_which_are_keys_and_values() -> None:
    with pytest.raises(ConfigError, match=r"^cache\.kv_dtype: expected another format for .* latents, .* got k8v4$"):
        LATENT.stored_as("k8v4")
