import dataclasses

import numpy as np
import pytest
import torch

from radixkv.errors import InvariantViolation
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_key_is_detected_even_if_no_query_attends_to_it(bad: float, dtype: torch.dtype) -> None:
    """An infinite key may get a score of minus infinity, and so no weight: the attention output is then finite."""
    batch = PagedBatch.build([3], [3], [np.zeros(1, dtype=np.int32)], 16)
    step = PagedStep(KVPool.allocate(1, 2, 1, 16, 8, dtype=dtype), batch, TorchKernels())
    query, key, value = torch.full((3, 1, 8), -1.0), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    step.attend(AttentionCall(0, query, key, value, Scoring(1.0)))
    assert step.is_finite.tolist() == [True, True, True]
    key[1, 0, 4] = bad
    step.attend(AttentionCall(1, query, key, value, Scoring(1.0)))
    assert step.is_finite.tolist() == [True, False, True]


def test_values_are_hadamard_transformed_before_int4_quantization() -> None:
    """Large numbers in a few dimensions of each value cost the others less precision than without the transform."""
    num_tokens = 24
    batch = PagedBatch.build([num_tokens], [num_tokens], [np.arange(2, dtype=np.int32)], 16)
    query, key, value = torch.randn(3, num_tokens, 2, 64).unbind(0)
    value[..., 9] *= 16
    attended = {}
    for dtype, is_rotated in ((torch.float32, False), (torch.int4, True), (torch.int4, False)):
        pool = KVPool.allocate(2, 1, 2, 16, 64, dtype=dtype)
        assert pool.rotates_values == (dtype == torch.int4)
        step = PagedStep(dataclasses.replace(pool, rotates_values=is_rotated), batch, TorchKernels())
        attended[dtype, is_rotated] = step.attend(AttentionCall(0, query, key, value, Scoring(0.125)))
    expected = attended[torch.float32, False]
    error = (attended[torch.int4, True] - expected).norm()
    error_without_transform = (attended[torch.int4, False] - expected).norm()
    assert error < 0.7 * error_without_transform
    assert error < 0.3 * expected.norm()


def test_values_beyond_the_range_of_the_pools_dtype_are_not_finite() -> None:
    batch = PagedBatch.build([2], [2], [np.zeros(1, dtype=np.int32)], 16)
    key = torch.ones(2, 1, 8)
    key[1] = 3.4e38  # finite in float32, but rounded to infinity in bfloat16
    for dtype, expected in ((torch.float32, True), (torch.int8, True), (torch.bfloat16, False)):
        step = PagedStep(KVPool.allocate(1, 1, 1, 16, 8, dtype=dtype), batch, TorchKernels())
        step.attend(AttentionCall(0, 0 * key, key, key, Scoring(1.0)))
        assert step.is_finite.tolist() == [True, expected]


def test_a_step_without_attention_raises() -> None:
    batch = PagedBatch.build([1], [1], [np.zeros(1, dtype=np.int32)], 16)
    step = PagedStep(KVPool.allocate(1, 1, 1, 16, 8, dtype=torch.float32), batch, TorchKernels())
    with pytest.raises(InvariantViolation, match="no layer of the model has attended"):
        _ = step.is_finite
