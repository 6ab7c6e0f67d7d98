"""The C++ kernels compute attention if they support it, with one plan per step; torch computes the rest."""

import ctypes
from typing import Any

import pytest
import torch

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels import reference
from radixkv.kernels.native.attention_work import AttentionWork
from radixkv.kernels.native.compiler import NotCompiled
from radixkv.kernels.native.library import load_library
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention import native_kernels
from radixkv.model.attention.native_kernels import NativeKernels
from radixkv.model.attention.torch_kernels import TorchKernels
from tests.kernels.cases import GQA, LAYER, Step, make_step


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        return load_library(cache_directory())
    except NotCompiled as reason:
        pytest.skip(str(reason))


def attend(kernels: NativeKernels, step: Step, scoring: Scoring, layer: int = LAYER) -> torch.Tensor:
    return kernels.paged_attention(step.query, step.pool, layer, step.batch, scoring)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["plain pool", "quantized pool"])
def test_all_pools_are_served(kv_dtype: torch.dtype | None, library: ctypes.CDLL) -> None:
    step = make_step([100, 0], [5, 70], GQA, kv_dtype=kv_dtype)
    expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.2))
    torch.testing.assert_close(attend(NativeKernels(library), step, Scoring(0.2)), expected)


def test_a_quantized_pool_is_left_to_torch(library: ctypes.CDLL) -> None:
    step = make_step([100, 0], [5, 70], GQA, kv_dtype=torch.int8)
    expected = TorchKernels().paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.2))
    assert torch.equal(attend(NativeKernels(library), step, Scoring(0.2)), expected)


def test_a_step_is_planned_once_for_each_window(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_windows: list[int | None] = []
    plan_work = native_kernels.plan_work

    def record_and_plan(*args: Any, window: int | None, **options: Any) -> AttentionWork:
        planned_windows.append(window)
        return plan_work(*args, window=window, **options)

    monkeypatch.setattr(native_kernels, "plan_work", record_and_plan)
    step, kernels = make_step([100, 0], [5, 70], GQA), NativeKernels(library)
    step.pool.values[:, 1 - LAYER] = 1
    for _ in range(2):
        for layer in (0, 1):
            for window in (None, 50):
                for scale in (0.1, 0.2):
                    attend(kernels, step, Scoring(scale, window), layer)
    assert planned_windows == [None, 50]


def test_layers_that_differ_in_more_than_their_window_have_separate_plans(library: ctypes.CDLL) -> None:
    step, kernels = make_step([100, 0], [5, 70], GQA), NativeKernels(library)
    for options in ({}, {"softcap": 3.0}, {"window": 30}, {"sinks": torch.ones(6)}, {}):
        scoring = Scoring(0.3, **options)
        expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, scoring)
        torch.testing.assert_close(attend(kernels, step, scoring), expected)


def test_another_step_is_planned_again(library: ctypes.CDLL) -> None:
    kernels = NativeKernels(library)
    for query_lens in ([5, 70], [1, 1], [17, 3], [5, 70]):
        step = make_step([100, 0], query_lens, GQA)
        expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(0.2))
        torch.testing.assert_close(attend(kernels, step, Scoring(0.2)), expected)
