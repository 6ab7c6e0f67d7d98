"""The planner reproduces published figures, one per case, and refuses invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import ConfigError
from radixkv.planning.plan import (
    GB,
    GIB,
    BlockUse,
    DecodingCost,
    DeviceMemory,
    PrefixSharing,
    load_us,
    recompute_us,
)
from radixkv.storage.kv_layout import HeadKV, KVFormat, LatentKV, attention_kinds

BF16 = KVFormat("bf16")
LLAMA_8B = HeadKV(num_layers=32, num_kv_heads=8, head_dim=128, num_query_heads=32)
LLAMA_70B = HeadKV(num_layers=80, num_kv_heads=8, head_dim=128, num_query_heads=64)


# Published figures.


def test_a_batch_of_64_times_8192_tokens_takes_64_gib() -> None:
    tokens = 64 * 8192
    assert LLAMA_8B.token_bytes(BF16) == 131_072
    assert tokens * LLAMA_8B.token_bytes(BF16) == 68_719_476_736 == 64 * GIB
    assert tokens * LLAMA_8B.rank_token_bytes(BF16, tensor_parallel=1) == 64 * GIB


@pytest.mark.parametrize(
    ("name", "gib"),
    [("fp32", 128), ("bf16", 64), ("fp16", 64), ("fp8", 32), ("int8", 32), ("k8v4", 24), ("fp4", 16), ("int4", 16)],
)
def test_the_same_batch_in_other_formats_before_scales(name: str, gib: int) -> None:
    assert 64 * 8192 * LLAMA_8B.token_bytes(KVFormat(name)) == gib * GIB


def test_one_sequence_of_8192_tokens_takes_1_gib() -> None:
    assert 8192 * LLAMA_8B.token_bytes(BF16) == GIB


def test_mha_gqa_mqa_of_32_query_heads_take_64_16_2_gib() -> None:
    kinds = attention_kinds(num_layers=32, num_query_heads=32, head_dim=128, num_kv_heads=8)
    sizes = {name: 16 * 8192 * layout.token_bytes(BF16) for name, layout in kinds.items() if name != "MLA"}
    assert sizes == {"MHA": 64 * GIB, "GQA": 16 * GIB, "MQA": 2 * GIB}


def test_llama_3_70b_takes_327680_bytes_per_token() -> None:
    token_bytes = LLAMA_70B.token_bytes(KVFormat("fp16"))
    assert token_bytes == 327_680
    assert [k * 1024 * token_bytes / GIB for k in (4, 32, 128)] == [1.25, 10, 40]


def test_70b_with_full_multi_head_attention_takes_335_gb_at_128000_tokens() -> None:
    token_bytes = HeadKV(num_layers=80, num_kv_heads=64, head_dim=128).token_bytes(KVFormat("fp16"))
    assert token_bytes == 2_621_440
    assert round(128_000 * token_bytes / GB, 1) == 335.5
    assert round(131_072 * token_bytes / GB, 1) == 343.6  # with 128 * 1024 tokens


def test_35_tokens_in_blocks_of_16_are_3_blocks_with_13_free() -> None:
    use = BlockUse(num_tokens=35, block_size=16)
    assert (use.num_blocks, use.last_block_tokens, use.free_tokens) == (3, 3, 13)


def test_a_24_gb_card_fits_5_users_at_8k_and_1_at_32k() -> None:
    card = DeviceMemory(24 * GB, weights_bytes=16 * GB, overhead_bytes=1 * GB)
    assert card.users(user_bytes=1_200_000_000) == 5
    assert card.users(user_bytes=5 * GB) == 1


def test_1000_requests_share_128_blocks_of_a_system_prompt() -> None:
    sharing = PrefixSharing(num_requests=1000, prefix_tokens=2048, block_size=16)
    block_bytes = 16 * 128 * 1024
    assert sharing.shared_blocks == sharing.num_blocks == 128
    assert (sharing.computed_tokens, sharing.computed_tokens_unshared) == (2048, 2_048_000)
    assert sharing.num_blocks * block_bytes == 256 * 2**20
    assert sharing.num_blocks_unshared * block_bytes == 250 * GIB


def test_cached_decoding_gives_the_outputs_of_naive_decoding_for_fewer_flops() -> None:
    """One attention layer, a prompt of 256 tokens, 128 new tokens, hidden size 128."""
    cost = DecodingCost(prompt_tokens=256, new_tokens=128, hidden_size=128)
    measured_speedup = 13.07  # of times on a laptop, which include overhead that the ratio of FLOPs leaves out
    assert cost.ratio > measured_speedup
    layer = AttentionLayer(hidden_size=128)
    # The last new token is an output only, so the layer has 127 inputs after the prompt.
    inputs = np.random.default_rng(0).standard_normal((256 + 127, 128)).astype(np.float32)
    naive, naive_flops = layer.decode_naive(inputs, 256), layer.take_flops()
    cached, cached_flops = layer.decode_cached(inputs, 256), layer.take_flops()
    np.testing.assert_allclose(naive, cached, atol=1e-4)
    assert (naive_flops, cached_flops) == (cost.naive_flops, cost.cached_flops)


def test_hbm_is_84_times_as_fast_as_pcie() -> None:
    assert round(3.35e12 / 40e9) == 84
    assert round(load_us(GB, 40e9) / load_us(GB, 3.35e12)) == 84


def test_loading_128_kib_takes_2_to_3_us() -> None:
    assert round(load_us(128 * 1024, 40e9)) == 3
    assert round(load_us(128 * 1024, 64e9)) == 2  # PCIe 5.0 x16, the nominal rate


def test_recomputing_a_token_of_an_8b_model_takes_about_20_us_on_an_h100() -> None:
    assert recompute_us(8e9, 989e12) == pytest.approx(16.2, abs=0.1)  # at the peak of dense bf16
    assert recompute_us(8e9, 800e12) == pytest.approx(20)


# Token layouts.


def test_scales_add_4_bytes_for_each_k_and_v_vector() -> None:
    plain, scaled = (LLAMA_8B.token_bytes(KVFormat("int8", has_scales)) for has_scales in (False, True))
    assert scaled - plain == 32 * 2 * 8 * 4


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_formats_of_16_bits_or_more_have_no_scales(name: str) -> None:
    with pytest.raises(ConfigError, match=f"scales: expected a dtype below 16 bits, got {name}"):
        KVFormat(name, has_scales=True)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype: expected one of fp32, bf16, .*, got fp7"):
        KVFormat("fp7")


def test_half_bytes_round_up_to_a_whole_byte() -> None:
    assert LatentKV(num_layers=1, rank=2, rope_dim=1).token_bytes(KVFormat("int4")) == 2


def test_deepseek_v3_stores_70272_bytes_per_token() -> None:
    latent = LatentKV(num_layers=61, rank=512, rope_dim=64)
    assert latent.token_bytes(BF16) == 70_272
    assert latent.token_bytes(KVFormat("fp8", has_scales=True)) == 61 * (512 + 64) + 61 * 4


def test_every_rank_stores_the_whole_latent() -> None:
    latent = LatentKV(num_layers=61, rank=512, rope_dim=64)
    assert latent.rank_token_bytes(BF16, tensor_parallel=8) == latent.token_bytes(BF16)


@pytest.mark.parametrize(("tensor_parallel", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_ranks_divide_the_kv_heads_until_each_has_one(tensor_parallel: int, heads: int) -> None:
    assert LLAMA_8B.rank_kv_heads(tensor_parallel) == heads
    assert LLAMA_8B.rank_token_bytes(BF16, tensor_parallel) == 32 * 2 * heads * 128 * 2


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_a_rank_stores_the_heads_that_its_query_heads_read(num_kv_heads: int, tensor_parallel: int) -> None:
    """There are `tensor_parallel` query heads per KV head, so each rank has `num_kv_heads` query heads."""
    num_query_heads = num_kv_heads * tensor_parallel
    max_heads_read = 0
    for rank in range(tensor_parallel):
        query_heads = range(rank * num_kv_heads, (rank + 1) * num_kv_heads)
        max_heads_read = max(max_heads_read, len({query_head // tensor_parallel for query_head in query_heads}))
    assert HeadKV(1, num_kv_heads, 1, num_query_heads).rank_kv_heads(tensor_parallel) == max_heads_read
    assert HeadKV(1, num_kv_heads, 1).rank_kv_heads(tensor_parallel) == max_heads_read


def test_ranks_must_divide_the_query_heads() -> None:
    with pytest.raises(ConfigError, match="num_query_heads: expected a multiple of tp 3, got 32"):
        LLAMA_8B.rank_kv_heads(3)


def test_kv_heads_must_divide_the_query_heads() -> None:
    with pytest.raises(ConfigError, match="num_query_heads: expected a multiple of num_kv_heads 8, got 30"):
        HeadKV(num_layers=1, num_kv_heads=8, head_dim=1, num_query_heads=30)


def test_kinds_take_the_models_own_groups_and_latent() -> None:
    latent = LatentKV(num_layers=2, rank=30, rope_dim=6)
    kinds = attention_kinds(2, 12, 64, num_kv_heads=3, latent=latent)
    assert list(kinds) == ["MHA", "GQA", "MQA", "MLA"]
    assert kinds["GQA"] == HeadKV(2, 3, 64, 12)
    assert kinds["MLA"] is latent


def test_kinds_of_a_model_without_groups_or_latent_take_usual_ones() -> None:
    kinds = attention_kinds(2, 128, 128, num_kv_heads=128)
    assert kinds["GQA"] == HeadKV(2, 8, 128, 128)
    assert kinds["MLA"] == LatentKV(2, rank=512, rope_dim=64)  # what DeepSeek-V2 has for heads of 128
    assert attention_kinds(2, 8, 64, num_kv_heads=1)["GQA"] == HeadKV(2, 4, 64, 8)


def test_heads_that_make_no_groups_have_no_gqa() -> None:
    assert list(attention_kinds(2, 7, 64)) == ["MHA", "MQA", "MLA"]
    assert attention_kinds(2, 1, 1)["MLA"] == LatentKV(2, rank=4, rope_dim=1)


# Edges of the counts.


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, (0, 0, 0)), (1, (1, 1, 15)), (15, (1, 15, 1)), (16, (1, 16, 0)), (17, (2, 1, 15))]
)
def test_block_use_around_multiples_of_the_block_size(num_tokens: int, expected: tuple[int, int, int]) -> None:
    use = BlockUse(num_tokens, 16)
    assert (use.num_blocks, use.last_block_tokens, use.free_tokens) == expected


def test_a_block_larger_than_the_prompt_wastes_the_other_slots() -> None:
    assert BlockUse(num_tokens=5, block_size=64).free_tokens == 59


def test_a_prefix_that_ends_inside_a_block_is_computed_once_and_each_request_copies_that_block() -> None:
    sharing = PrefixSharing(num_requests=10, prefix_tokens=35, block_size=16)
    assert (sharing.shared_blocks, sharing.num_blocks, sharing.num_blocks_unshared) == (2, 2 + 10, 30)
    assert (sharing.computed_tokens, sharing.computed_tokens_unshared) == (35, 350)


def test_a_prefix_shorter_than_a_block_shares_tokens_but_no_memory() -> None:
    sharing = PrefixSharing(num_requests=10, prefix_tokens=35, block_size=64)
    assert sharing.shared_blocks == 0
    assert sharing.num_blocks == sharing.num_blocks_unshared == 10
    assert sharing.computed_tokens == 35


@pytest.mark.parametrize("prefix_tokens", [0, 35, 64])
def test_one_request_saves_nothing(prefix_tokens: int) -> None:
    sharing = PrefixSharing(1, prefix_tokens, 16)
    assert sharing.num_blocks == sharing.num_blocks_unshared
    assert sharing.computed_tokens == sharing.computed_tokens_unshared == prefix_tokens


def test_weights_that_do_not_fit_leave_no_memory_for_users() -> None:
    card = DeviceMemory(8 * GB, weights_bytes=16 * GB)
    assert (card.kv_bytes, card.users(1)) == (0, 0)


def test_a_user_that_fits_exactly_fits() -> None:
    card = DeviceMemory(10, weights_bytes=3, overhead_bytes=1)
    assert (card.users(3), card.users(6), card.users(7)) == (2, 1, 0)


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(1, 1), (1, 5), (7, 1), (5, 4)])
def test_decoding_flops_are_those_of_the_steps(prompt_tokens: int, new_tokens: int) -> None:
    def step_flops(rows: int, keys: int) -> int:
        projection_multiply_adds = 4 * rows * 3 * 3  # of queries, keys, values and outputs
        attention_multiply_adds = 2 * rows * keys * 3  # scores, and weighted values
        return 2 * (projection_multiply_adds + attention_multiply_adds)

    lengths = range(prompt_tokens, prompt_tokens + new_tokens)
    cost = DecodingCost(prompt_tokens, new_tokens, hidden_size=3)
    assert cost.naive_flops == sum(step_flops(length, length) for length in lengths)
    prefill_flops = step_flops(prompt_tokens, prompt_tokens)
    assert cost.cached_flops == prefill_flops + sum(step_flops(1, length) for length in lengths[1:])


def test_decoding_one_token_gains_nothing() -> None:
    assert DecodingCost(prompt_tokens=100, new_tokens=1, hidden_size=8).ratio == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadKV(0, 8, 128), "num_layers: expected at least 1, got 0"),
        (lambda: HeadKV(32, 0, 128), "num_kv_heads: expected at least 1, got 0"),
        (lambda: HeadKV(32, 8, -1), "head_dim: expected at least 1, got -1"),
        (lambda: HeadKV(32, 8, 128, 0), "num_query_heads: expected at least 1, got 0"),
        (lambda: LLAMA_8B.rank_kv_heads(0), "tp: expected at least 1, got 0"),
        (lambda: LatentKV(0, 1, 1), "num_layers: expected at least 1, got 0"),
        (lambda: LatentKV(1, 0, 1), "mla_rank: expected at least 1, got 0"),
        (lambda: LatentKV(1, 1, 0), "rope_dim: expected at least 1, got 0"),
        (lambda: LatentKV(1, 1, 1).rank_token_bytes(BF16, 0), "tp: expected at least 1, got 0"),
        (lambda: BlockUse(-1, 16), "num_tokens: expected at least 0, got -1"),
        (lambda: BlockUse(1, 0), "block_size: expected at least 1, got 0"),
        (lambda: DeviceMemory(-1, 0), "memory: expected at least 0, got -1"),
        (lambda: DeviceMemory(1, -1), "weights: expected at least 0, got -1"),
        (lambda: DeviceMemory(1, 0, -1), "overhead: expected at least 0, got -1"),
        (lambda: DeviceMemory(1, 0).users(0), "user_bytes: expected at least 1, got 0"),
        (lambda: PrefixSharing(0, 1, 1), "requests: expected at least 1, got 0"),
        (lambda: PrefixSharing(1, -1, 1), "shared_prefix: expected at least 0, got -1"),
        (lambda: PrefixSharing(1, 1, 0), "block_size: expected at least 1, got 0"),
        (lambda: DecodingCost(0, 1, 1), "prompt_tokens: expected at least 1, got 0"),
        (lambda: DecodingCost(1, 0, 1), "new_tokens: expected at least 1, got 0"),
        (lambda: DecodingCost(1, 1, 0), "hidden_size: expected at least 1, got 0"),
        (lambda: load_us(-1, 1.0), "num_bytes: expected at least 0, got -1"),
        (lambda: load_us(1, 0.0), "bandwidth: expected a positive number, got 0.0"),
        (lambda: recompute_us(float("nan"), 1.0), "params: expected a positive number, got nan"),
        (lambda: recompute_us(1.0, float("inf")), "flops_per_s: expected a positive number, got inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, message) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


# Against what the service allocates.


def test_the_planner_agrees_with_the_embedded_model() -> None:
    torch = pytest.importorskip("torch")
    from radixkv.config import ModelConfig
    from radixkv.model.loading import load_model
    from radixkv.storage.device_pool import KVStorage

    model_shape = load_model(ModelConfig(dtype="float32", device="cpu")).kv_shape
    layout = HeadKV(model_shape.num_layers, model_shape.num_kv_heads, model_shape.head_dim)
    for kv_dtype, name in (("auto", "fp32"), ("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("k8v4", "k8v4")):
        shape = model_shape.stored_as(kv_dtype)
        kv_format = KVFormat(name, has_scales=kv_dtype in ("fp8", "int8", "k8v4"))
        assert layout.token_bytes(kv_format) == shape.token_bytes
        storage = KVStorage(3, 16, shape, torch.device("cpu"))
        assert 16 * layout.token_bytes(kv_format) == storage.block_bytes == storage.pool.blocks[0].nbytes


class AttentionLayer:
    """One causal attention head in numpy, decoding a sequence whose inputs are known. Counts its FLOPs."""

    def __init__(self, hidden_size: int) -> None:
        draws = np.random.default_rng(1).standard_normal((4, hidden_size, hidden_size)).astype(np.float32)
        self.to_query, self.to_key, self.to_value, self.to_output = draws / np.sqrt(hidden_size, dtype=np.float32)
        self._flops = 0

    def take_flops(self) -> int:
        """Return the FLOPs of all matmuls since the last call, and start counting from 0 again."""
        flops, self._flops = self._flops, 0
        return flops

    def decode_naive(self, inputs, prompt_tokens):
        """Return the last output of every step; each step computes keys, values and outputs of all inputs again."""
        outputs = []
        for end in range(prompt_tokens, len(inputs) + 1):
            keys, values = self._project(inputs[:end])
            outputs.append(self._attend(inputs[:end], keys, values)[-1])
        return np.stack(outputs)

    def decode_cached(self, inputs, prompt_tokens):
        """Return the last output of every step; each step reuses the keys and values of the steps before it."""
        keys, values = np.empty_like(inputs), np.empty_like(inputs)
        outputs, start = [], 0
        for end in range(prompt_tokens, len(inputs) + 1):
            keys[start:end], values[start:end] = self._project(inputs[start:end])
            outputs.append(self._attend(inputs[start:end], keys[:end], values[:end])[-1])
            start = end
        return np.stack(outputs)

    def _project(self, rows):
        return self._matmul(rows, self.to_key), self._matmul(rows, self.to_value)

    def _attend(self, rows, keys, values):
        queries = self._matmul(rows, self.to_query)
        scores = self._matmul(queries, keys.T) / np.sqrt(np.float32(keys.shape[1]))  # [num_rows, num_keys]
        is_future = np.arange(len(keys)) > np.arange(len(keys) - len(rows), len(keys))[:, None]
        scores[is_future] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = self._matmul(weights / weights.sum(axis=1, keepdims=True), values)
        return self._matmul(attended, self.to_output)

    def _matmul(self, left, right):
        self._flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return left @ right
