"""FlashInfer's attention over our pool, through a fake of its interface: one plan per step, never in exact mode."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.flashinfer_kernels import FlashInferKernels, flashinfer_kernels
from radixkv.model.attention.interface import AttentionKind, AttentionUse, PlanningKernels
from radixkv.model.attention.refused_attention import FLASHINFER, POINTERS
from radixkv.model.attention.triton_kernels import TritonKernels
from radixkv.startup import attention_trial
from radixkv.startup.attention_check import check_attention
from radixkv.startup.attention_choice import choose_attention_kernels
from radixkv.storage.device_pool import KVShape
from tests.model.attention import flashinfer_stand_in
from tests.model.attention.flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype=BF16)
KIND = AttentionKind(4, window=None, softcap=None)
USE = AttentionUse((KIND,), BF16, SHAPE, 16, CPU, is_exact=False)
HOPPER, AMPERE = (9, 0), (8, 0)


class OurKernels(TritonKernels):
    """In place of our Triton kernels: computes the reference on a CPU, and counts the calls."""

    def __init__(self) -> None:
        super().__init__(is_exact=False)
        self.num_calls = 0

    write_kv = staticmethod(reference.write_kv)

    def paged_attention(self, *arguments: Any) -> torch.Tensor:
        self.num_calls += 1
        return reference.paged_attention(*arguments)


class FlashInferOnCpu(FlashInferKernels):
    """FlashInfer's kernels, with the reference to write K/V on a CPU."""

    write_kv = staticmethod(reference.write_kv)


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[BatchPrefillWithPagedKVCacheWrapper]:
    return flashinfer_stand_in.install(monkeypatch)


def test_the_trial_of_our_own_kernels_is_passed(wrappers: list[BatchPrefillWithPagedKVCacheWrapper]) -> None:
    """`check_attention` tries ragged batches, windows, softcaps, unwritten slots, and adjacent and scattered blocks."""
    kinds = (KIND, AttentionKind(4, 100, None), AttentionKind(2, 100, 30.0))
    check_attention(FlashInferOnCpu(OurKernels(), "fa3"), replace(USE, kinds=kinds))
    assert {wrapper.backend for wrapper in wrappers} == {"fa3"}


def test_a_wrong_answer_is_refused(
    wrappers: list[BatchPrefillWithPagedKVCacheWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BatchPrefillWithPagedKVCacheWrapper.run

    def run_with_wrong_scale(
        self: BatchPrefillWithPagedKVCacheWrapper, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor
    ) -> torch.Tensor:
        return out.copy_(1.5 * run(self, query, cache, out=out))

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "run", run_with_wrong_scale)
    with pytest.raises(UnsupportedModel, match=r"a relative distance of at most 0\.03"):
        check_attention(FlashInferOnCpu(OurKernels(), "fa2"), USE)


def step(*query_lens: int) -> PagedBatch:
    """Build a batch of one or two requests, with 40 and 33 tokens in total."""
    tables = [np.array([3, 1, 2], dtype=np.int32), np.array([5, 4, 0], dtype=np.int32)]
    return PagedBatch.build(query_lens, [40, 33][: len(query_lens)], tables[: len(query_lens)], 16)


def test_a_step_is_planned_once_for_all_layers_with_the_same_scoring(
    wrappers: list[BatchPrefillWithPagedKVCacheWrapper],
) -> None:
    pool = KVPool.allocate(6, 2, 2, 16, 64, dtype=BF16)
    pool.values.normal_()
    kernels = FlashInferKernels(OurKernels(), "fa2")
    full, windowed = Scoring(0.125), Scoring(0.125, window=9)
    for num_steps, batch in enumerate((step(5, 7), step(5, 7), step(40)), 1):
        query = torch.randn(batch.num_tokens, 4, 64, dtype=BF16)
        for layer, scoring in ((0, full), (1, full), (0, windowed), (1, windowed)):
            got = kernels.paged_attention(query, pool, layer, batch, scoring)
            expected = reference.paged_attention(query, pool, layer, batch, scoring)
            torch.testing.assert_close(got.float(), expected.float(), rtol=0.02, atol=0.02)
        assert [wrapper.num_plans for wrapper in wrappers] == [num_steps, num_steps]
    assert len({wrapper.workspace.data_ptr() for wrapper in wrappers}) == 1


def test_captured_steps_use_our_own_kernels(wrappers: list[BatchPrefillWithPagedKVCacheWrapper]) -> None:
    ours = OurKernels()
    kernels = FlashInferKernels(ours, "fa3")
    pool, query = KVPool.allocate(6, 1, 2, 16, 64, dtype=BF16), torch.randn(12, 4, 64, dtype=BF16)
    captured, eager = step(5, 7), step(5, 7)
    kernels.use_plans(captured, {})  # as for a step that a CUDA graph captures
    kernels.paged_attention(query, pool, 0, captured, Scoring(0.125))
    assert (ours.num_calls, len(wrappers)) == (1, 0)
    kernels.paged_attention(query, pool, 0, eager, Scoring(0.125))
    assert (ours.num_calls, len(wrappers)) == (1, 1)
    kernels.paged_attention(query, pool, 0, captured, Scoring(0.125))
    assert (ours.num_calls, len(wrappers)) == (2, 1)


def test_flashinfer_is_a_candidate_only_for_what_it_supports(
    wrappers: list[BatchPrefillWithPagedKVCacheWrapper],
) -> None:
    ours = OurKernels()
    backends = {
        capability: flashinfer_kernels(USE, capability, ours) for capability in (HOPPER, AMPERE, (10, 0), (7, 5))
    }
    assert {capability: kernels and kernels._backend for capability, kernels in backends.items()} == {
        HOPPER: "fa3",
        AMPERE: "fa2",
        (10, 0): "fa2",
        (7, 5): None,
    }
    odd_head_dim = replace(USE, shape=replace(SHAPE, head_dim=80))
    quantized = replace(USE, shape=SHAPE.stored_as("fp8"))
    float32 = replace(USE, dtype=torch.float32, shape=replace(SHAPE, dtype=torch.float32))
    sinks = replace(USE, kinds=(KIND._replace(has_sinks=True),))
    for use in (replace(USE, is_exact=True), odd_head_dim, quantized, float32, sinks):
        assert flashinfer_kernels(use, HOPPER, ours) is None


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="it is installed")
def test_without_flashinfer_nothing_changes() -> None:
    assert flashinfer_kernels(USE, HOPPER, OurKernels()) is None


def model(is_exact: bool) -> Any:
    """Make a fake of a model on a GPU that has only the attributes which the choice of kernels reads."""

    def attention_uses(shape: KVShape, block_size: int) -> tuple[AttentionUse, ...]:
        return (AttentionUse((KIND,), BF16, shape, block_size, CUDA, is_exact),)

    return SimpleNamespace(device=CUDA, is_exact=is_exact, attention_uses=attention_uses)


@pytest.mark.parametrize("refusal", ["", FLASHINFER, "warp-specialized attention"])
def test_flashinfer_serves_with_our_best_kernel_if_it_passes(
    refusal: str,
    wrappers: list[BatchPrefillWithPagedKVCacheWrapper],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    tried = []

    def attempt(name: str, use: AttentionUse) -> None:
        tried.append(name)
        if name == refusal:
            raise UnsupportedModel("not here")

    kernels = choose_attention_kernels(model(is_exact=False), SHAPE, 64, attempt)
    assert tried == ["warp-specialized attention", FLASHINFER]
    assert isinstance(kernels, TritonKernels if refusal == FLASHINFER else FlashInferKernels)
    ours = kernels._triton if isinstance(kernels, FlashInferKernels) else kernels
    assert ours._is_specialized == (refusal != "warp-specialized attention")
    assert not ours._has_idle_work
    assert caplog.messages == ([f"{refusal} is not used: not here"] if refusal else [])
    tried.clear()
    assert isinstance(choose_attention_kernels(model(is_exact=True), SHAPE, 64, attempt), TritonKernels)
    assert FLASHINFER not in tried
    monkeypatch.setenv("RADIXKV_REFUSED_ATTENTION", FLASHINFER)
    assert isinstance(choose_attention_kernels(model(is_exact=False), SHAPE, 64, attempt), TritonKernels)
    assert FLASHINFER not in tried


def test_a_trial_selects_flashinfer_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FlashInferOnCpu(OurKernels(), "fa2")
    monkeypatch.setattr(attention_trial, "flashinfer_candidate", lambda use: kernels)
    assert attention_trial._find_kernels(FLASHINFER, USE) is kernels
    assert isinstance(attention_trial._find_kernels(POINTERS, USE), TritonKernels)
    monkeypatch.undo()
    with pytest.raises(UnsupportedModel, match="it is not installed, or does not support"):
        attention_trial.try_attention_here(FLASHINFER, USE)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_stand_in_has_the_signatures_of_the_installed_package(method: str) -> None:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Real

    def parameters(wrapper: type) -> list[tuple[str, Any, Any]]:
        signature = inspect.signature(getattr(wrapper, method))
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    assert parameters(BatchPrefillWithPagedKVCacheWrapper) == parameters(Real)


def test_flashinfer_kernels_have_all_methods_that_captured_steps_call() -> None:
    called = {name for name in dir(PlanningKernels) if not name.startswith("_")}
    assert {"plan", "tile_rows", "use_plans", "write_kv"} <= called
    assert called <= set(dir(FlashInferKernels(OurKernels(), "fa3")))
