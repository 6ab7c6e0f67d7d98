"""The reference kernels, compared with results computed by hand or in another way."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring

from .cases import GQA, LAYER, MHA, MQA, make_step, poisoned_pool


def contiguous_kv(pool: KVPool, batch: PagedBatch, request: int) -> torch.Tensor:
    """Read the K/V of a request slot by slot, `[kv_len, 2, num_kv_heads, head_dim]`."""
    rows = []
    for position in range(batch.kv_lens[request]):
        block_id = int(batch.block_tables[request, position // batch.block_size])
        rows.append(pool.values[block_id, LAYER, :, :, position % batch.block_size])
    return torch.stack(rows)


def test_cold_attention_is_torch_causal_attention() -> None:
    step = make_step([0], [37], GQA)
    key, value = contiguous_kv(step.pool, step.batch, 0).permute(1, 2, 0, 3)
    expected = scaled_dot_product_attention(
        step.query.transpose(0, 1)[None], key[None], value[None], is_causal=True, scale=0.3, enable_gqa=True
    )
    got = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.3))
    torch.testing.assert_close(got, expected[0].transpose(0, 1))


def test_warm_attention_is_the_tail_of_cold_attention() -> None:
    cold = make_step([0, 0], [37, 20], GQA)
    warm_batch = PagedBatch.build([16, 1], [37, 20], list(cold.batch.block_tables.numpy()), 16)
    warm_query = torch.cat([cold.query[21:37], cold.query[56:57]])
    attend = partial(reference.paged_attention, scoring=Scoring(0.2, 11, 3.0))
    expected = attend(cold.query, cold.pool, LAYER, cold.batch)
    got = attend(warm_query, cold.pool, LAYER, warm_batch)
    torch.testing.assert_close(got, torch.cat([expected[21:37], expected[56:57]]))


def test_window_of_one_returns_the_tokens_own_value() -> None:
    step = make_step([5], [12], MHA)
    value = contiguous_kv(step.pool, step.batch, 0)[5:, 1]
    got = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(1.0, window=1))
    torch.testing.assert_close(got, value)


def test_a_sink_is_a_key_whose_value_is_zero() -> None:
    step = make_step([5], [12], GQA)
    sinks = torch.linspace(-2, 3, 6)
    plain = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.3))
    got = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.3, sinks=sinks))
    key = contiguous_kv(step.pool, step.batch, 0)[:, 0].repeat_interleave(3, dim=1)  # [17, 6, head_dim]
    weights = (torch.einsum("hd,khd->hk", step.query[-1], key) * 0.3).exp().sum(dim=-1)
    torch.testing.assert_close(got[-1], plain[-1] * (weights / (weights + sinks.exp()))[:, None])


def test_tiny_softcap_averages_all_visible_values() -> None:
    step = make_step([0], [9], MHA)
    value = contiguous_kv(step.pool, step.batch, 0)[:, 1]
    got = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(1.0, softcap=1e-6))
    torch.testing.assert_close(got[8], value.mean(dim=0))


def test_write_kv_fills_exactly_its_slots() -> None:
    pool = poisoned_pool(3)
    key, value = torch.randn(2, 3, 2, 32).unbind(0)
    reference.write_kv(key, value, torch.tensor([33, 0, 31]), pool, 1)
    for row, (block_id, offset) in enumerate([(2, 1), (0, 0), (1, 15)]):
        assert torch.equal(pool.values[block_id, 1, 0, :, offset], key[row])
        assert torch.equal(pool.values[block_id, 1, 1, :, offset], value[row])
    assert torch.isfinite(pool.values).sum() == 2 * 3 * 2 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_latent_is_key_and_value(dtype: torch.dtype) -> None:
    latent = make_step([0, 3], [17, 14], MQA, kv_dtype=dtype, is_latent=True)
    pair = make_step([0, 3], [17, 14], MQA, kv_dtype=dtype)
    # Both pools get the same vectors: first in all 34 slots, then in those of the 31 new tokens.
    vectors, largest = torch.randn(31, 1, 32), torch.zeros(31, 1)
    for step in (latent, pair):
        slots = PagedBatch.build([17, 17], [17, 17], [*step.batch.host_tables], 16).slots
        earlier_vectors = torch.randn(34, 1, 32, generator=torch.Generator().manual_seed(1))
        value = None if step is latent else earlier_vectors
        reference.write_kv(earlier_vectors, value, slots, step.pool, LAYER)
    reference.write_kv(vectors, None, latent.batch.slots, latent.pool, LAYER, largest)
    reference.write_kv(vectors, vectors, pair.batch.slots, pair.pool, LAYER)
    assert torch.equal(largest, vectors.abs().amax(-1))
    got, expected = (
        reference.paged_attention(latent.query, step.pool, LAYER, step.batch, Scoring(0.2)) for step in (latent, pair)
    )
    assert torch.equal(got, expected)


def test_write_kv_of_a_quantized_pool_leaves_its_neighbours_alone() -> None:
    pool = poisoned_pool(2, dtype=torch.int4)
    key, value = torch.randn(2, 1, 2, 32).unbind(0)
    reference.write_kv(key, value, torch.tensor([17]), pool, 1)
    assert pool.scales is not None
    assert torch.equal(pool.scales.isfinite().nonzero()[:, [0, 1, 4]].unique(dim=0), torch.tensor([[1, 1, 1]]))
    kv = pool.to_numbers(pool.values[1, 1, :, :, 1], pool.scales[1, 1, :, :, 1])
    # Keys have 8 bits, values 4: the error is half a step of 1/127 or 1/7 of the largest magnitude.
    for got, vectors, num_steps in zip(kv, (key[0], value[0]), (254, 14), strict=True):
        assert ((got - vectors).abs() <= vectors.abs().amax(dim=-1, keepdim=True) / num_steps * 1.001).all()


def test_write_kv_then_attend_reads_back_what_was_written() -> None:
    step = make_step([0, 3], [17, 14], GQA)
    key, value = torch.randn(2, 31, 2, 32).unbind(0)
    reference.write_kv(key, value, step.batch.slots, step.pool, LAYER)
    torch.testing.assert_close(contiguous_kv(step.pool, step.batch, 0), torch.stack([key[:17], value[:17]], dim=1))
    torch.testing.assert_close(contiguous_kv(step.pool, step.batch, 1)[3:], torch.stack([key[17:], value[17:]], dim=1))


def test_copy_blocks_copies_whole_blocks_and_nothing_else() -> None:
    pool = poisoned_pool(6, dtype=torch.int8)
    pool.blocks.random_()
    before = pool.blocks.clone()
    reference.copy_blocks(pool, torch.tensor([1, 4, 1]), torch.tensor([0, 2, 5]))
    for block, source in enumerate([1, 1, 4, 3, 4, 1]):
        assert torch.equal(pool.blocks[block], before[source])
