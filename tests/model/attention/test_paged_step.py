import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import InvariantViolation, UnsupportedModel
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.paged_step import ATTENTION_NAME, PagedStep, _attention_forward
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model

LAYER = SimpleNamespace(layer_idx=1, is_causal=True)
QUERY, KEY = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)


class Recorder:
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring):
        self.layer, self.scoring, self.query = layer, scoring, query
        return query + 1


def call(**kwargs: object):
    return _attention_forward(LAYER, QUERY, KEY, KEY, kwargs.pop("mask", None), **kwargs)


def test_it_hands_rows_of_tokens_to_the_step_and_back() -> None:
    recorder = Recorder()
    out, weights = call(radix_step=recorder, scaling=0.5, sliding_window=7, softcap=30.0)
    assert recorder.layer == 1
    assert recorder.scoring == Scoring(0.5, window=7, softcap=30.0)
    assert recorder.query.shape == (3, 4, 8)
    assert torch.equal(out, QUERY.transpose(1, 2) + 1)
    assert weights is None


def test_the_scale_defaults_to_one_over_the_root_of_the_head_dimension() -> None:
    recorder = Recorder()
    call(radix_step=recorder)
    assert recorder.scoring == Scoring(8**-0.5)


def test_a_forward_without_its_step_raises() -> None:
    module = load_model(ModelConfig(device="cpu")).module
    assert module.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(UnsupportedModel, match="expected to attend in a forward pass over the cache, got none"):
        module(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)


def test_a_layer_without_its_number_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="`layer_idx`"):
        _attention_forward(SimpleNamespace(is_causal=True), QUERY, KEY, KEY, None, radix_step=Recorder())


def test_sinks_are_scored() -> None:
    recorder, sinks = Recorder(), torch.ones(4)
    call(radix_step=recorder, s_aux=sinks)
    assert recorder.scoring.sinks is sinks


@pytest.mark.parametrize(
    "options",
    [{"s_aux": torch.ones(1, 4, 3, 1)}, {"s_aux": torch.ones(4), "softcap": 30.0}],
    ids=["by token", "softcap"],
)
def test_sinks_of_another_kind_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="expected `s_aux` of one sink a query head and no `softcap`"):
        call(radix_step=Recorder(), **options)


@pytest.mark.parametrize("keyword", ["position_bias", "indices", "anything_new"])
def test_a_keyword_that_changes_attention_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"passes `{keyword}`"):
        call(radix_step=Recorder(), **{keyword: torch.ones(1)})


def test_a_keyword_that_is_none_is_nothing() -> None:
    out, _ = call(radix_step=Recorder(), s_aux=None)
    assert out.shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    "wrong", [{"mask": torch.ones(1)}, {"dropout": 0.1}, {"is_causal": False}], ids=["mask", "dropout", "not causal"]
)
def test_masks_dropout_and_looking_ahead_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="expected"):
        call(radix_step=Recorder(), **wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_key_that_no_query_notices_is_still_not_finite(bad: float, dtype: torch.dtype) -> None:
    """Against the query's sign an infinite key has a score of minus infinity: no weight, and a finite answer."""
    batch = PagedBatch.build([3], [3], [np.zeros(1, dtype=np.int32)], 16)
    step = PagedStep(KVPool.allocate(1, 2, 1, 16, 8, dtype=dtype), batch, TorchKernels())
    query, key, value = torch.full((3, 1, 8), -1.0), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    step.attend(0, query, key, value, Scoring(1.0))
    assert step.is_finite.tolist() == [True, True, True]
    key[1, 0, 4] = bad
    step.attend(1, query, key, value, Scoring(1.0))
    assert step.is_finite.tolist() == [True, False, True]


def test_vectors_of_four_bits_are_rotated_on_their_way() -> None:
    """Numbers that are large in a few places of each key and value cost the others less than without a rotation."""
    num_tokens = 24
    batch = PagedBatch.build([num_tokens], [num_tokens], [np.arange(2, dtype=np.int32)], 16)
    query, key, value = torch.randn(3, num_tokens, 2, 64).unbind(0)
    key[..., 7] *= 16
    value[..., 9] *= 16
    query[..., 7] /= 16
    attended = {}
    for dtype, is_rotated in ((torch.float32, False), (torch.int4, True), (torch.int4, False)):
        pool = KVPool.allocate(2, 1, 2, 16, 64, dtype=dtype)
        assert pool.is_rotated == (dtype == torch.int4)
        step = PagedStep(dataclasses.replace(pool, is_rotated=is_rotated), batch, TorchKernels())
        attended[dtype, is_rotated] = step.attend(0, query, key, value, Scoring(0.125))
    expected = attended.pop((torch.float32, False))
    rotated, plain = ((each - expected).norm().item() for each in attended.values())
    assert rotated < 0.7 * plain
    assert rotated < 0.3 * expected.norm()


def test_what_is_beyond_the_pools_dtype_is_not_finite_there() -> None:
    batch = PagedBatch.build([2], [2], [np.zeros(1, dtype=np.int32)], 16)
    key = torch.ones(2, 1, 8)
    key[1] = 3.4e38  # float32 has room for it
    for dtype, expected in ((torch.float32, True), (torch.int8, True), (torch.bfloat16, False)):
        step = PagedStep(KVPool.allocate(1, 1, 1, 16, 8, dtype=dtype), batch, TorchKernels())
        step.attend(0, 0 * key, key, key, Scoring(1.0))
        assert step.is_finite.tolist() == [True, expected]


def test_a_step_without_attention_is_a_mistake() -> None:
    batch = PagedBatch.build([1], [1], [np.zeros(1, dtype=np.int32)], 16)
    step = PagedStep(KVPool.allocate(1, 1, 1, 16, 8, dtype=torch.float32), batch, TorchKernels())
    with pytest.raises(InvariantViolation, match="no layer of the model has attended"):
        _ = step.is_finite
