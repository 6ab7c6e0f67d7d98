"""Kernels that fail or are wrong are not used. Most tests try CPU kernels that are each broken in one way."""

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import hopper_attention
from radixkv.kernels.gpu.attention_splits import DeviceCapacity
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model import on_cpu
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.attention.triton_kernels import TritonKernels, candidates
from radixkv.startup import attention_check
from radixkv.startup.attention_check import check_attention
from radixkv.startup.attention_choice import choose_attention_kernels, try_candidates
from radixkv.startup.attention_trial import try_attention_here
from radixkv.storage.device_pool import KVShape
from tests.kernels.gpu.interpreter import interpret_kernels

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=32, dtype=BF16)
KIND = AttentionKind(4, window=None, softcap=None)


class SpoiledKernels(TorchKernels):
    """Kernels whose results `spoil` changes; correct ones unless a subclass overrides it. Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def paged_attention(
        self, query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, scoring: Scoring
    ) -> torch.Tensor:
        self.num_calls += 1
        rows = super().paged_attention(query, pool, layer, batch, scoring)
        return self.spoil(rows, pool, batch, scoring.window)

    def spoil(self, rows: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None) -> torch.Tensor:
        return rows


class DoesNotCompile(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        raise RuntimeError("PassManager::run failed\nand a long dump")


class WrongNumbers(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        return rows * 1.05


class OneWrongRow(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        rows[-1] *= 1.5
        return rows


class OneNaN(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        rows[3, 1, 7] = float("nan")
        return rows


class WrongForTwoRequests(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None) -> torch.Tensor:
        return rows * 1.5 if batch.num_requests > 1 else rows


class WrongWithWindow(SpoiledKernels):
    def spoil(self, rows: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None) -> torch.Tensor:
        return rows if window is None else rows + 1


class ReadsPastTheEnd(SpoiledKernels):
    """Reads unwritten slots with a weight of 0, which does not hide their contents: 0 * NaN is NaN."""

    def spoil(self, rows: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None) -> torch.Tensor:
        last_block = batch.block_tables[-1, -(-batch.kv_lens[-1] // batch.block_size) - 1]
        return rows + 0 * pool.values[last_block, 0, 1].sum()


class BatchDependentBits(SpoiledKernels):
    """Results of batches differ by a rounding, as with another order of summation."""

    def spoil(self, rows: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None) -> torch.Tensor:
        return rows * (1 + 2**-7) if batch.num_requests > 1 else rows


def choose(*candidates: TorchKernels, kinds: tuple[AttentionKind, ...] = (KIND,), is_exact: bool = True) -> object:
    """Return the chosen kernels. The name of a candidate is that of its class and its index."""
    named = {f"{type(kernels).__name__} {index}": kernels for index, kernels in enumerate(candidates)}
    use = AttentionUse(kinds, BF16, SHAPE, 16, CPU, is_exact)
    return named[try_candidates(named, lambda name: check_attention(named[name], use))]


def test_the_first_correct_kernels_are_used(caplog: pytest.LogCaptureFixture) -> None:
    first, second = SpoiledKernels(), SpoiledKernels()
    assert choose(first, second) is first
    assert first.num_calls
    assert not second.num_calls
    assert not caplog.records


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (DoesNotCompile(), "does not run there: RuntimeError: PassManager::run failed"),
        (WrongNumbers(), "expected a relative distance of at most 0.03 from the reference, got 0.05"),
        (OneWrongRow(), "expected a relative distance of at most 0.03 from the reference, got 0.5"),
        (OneNaN(), "expected a relative distance of at most 0.03 from the reference, got nan"),
        (WrongForTwoRequests(), "expected a relative distance of at most 0.03 from the reference, got 0.5"),
        (ReadsPastTheEnd(), "expected a relative distance of at most 0.03 from the reference, got nan"),
        (BatchDependentBits(), "expected bitwise identical results in one step and in parts, got different ones"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_broken_kernels_are_skipped_and_named(
    broken: SpoiledKernels, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    sound = TorchKernels()
    assert choose(broken, sound) is sound
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"{type(broken).__name__} 0 is not used: attention over bf16 on cpu: {reason}")
    assert "\n" not in message


def test_each_kind_of_layer_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (KIND, AttentionKind(4, window=100, softcap=None))
    broken, sound = WrongWithWindow(), TorchKernels()
    assert choose(broken, sound) is broken
    assert choose(broken, sound, kinds=kinds) is sound


def test_batch_dependent_bits_are_accepted_in_fast_mode() -> None:
    broken = BatchDependentBits()
    assert choose(broken, TorchKernels(), is_exact=False) is broken


def test_several_broken_candidates_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    sound = TorchKernels()
    assert choose(DoesNotCompile(), WrongNumbers(), sound) is sound
    assert [record.getMessage().partition(" is not used")[0] for record in caplog.records] == [
        "DoesNotCompile 0",
        "WrongNumbers 1",
    ]


def test_the_last_candidate_is_not_tried_since_the_check_of_the_model_follows(caplog: pytest.LogCaptureFixture) -> None:
    last = WrongNumbers()
    assert choose(WrongNumbers(), last) is last
    assert not last.num_calls
    assert len(caplog.records) == 1


@pytest.mark.long
def test_warp_specialized_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)
    launch = hopper_attention.launch
    launched_tile_rows: set[int] = set()

    def recorded_launch(*inputs: Any, **scaling: Any) -> None:
        plan = inputs[4]
        launched_tile_rows.add(plan.tile_rows)
        launch(*inputs, **scaling)

    monkeypatch.setattr(hopper_attention, "launch", recorded_launch)
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=BF16)
    kernels = TritonKernels(is_exact=True, is_specialized=True)
    check_attention(kernels, AttentionUse((AttentionKind(2, 100, 30.0),), BF16, shape, 64, CPU, is_exact=True))
    assert launched_tile_rows == {hopper_attention.TILE_ROWS}, "the check launches no other kernels, or only others"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("kv_dtype", "is_specialized"), [("fp8", True), ("int8", False), ("k8v4", True)])
def test_blocks_dequantized_first_pass(kv_dtype: str, is_specialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)
    monkeypatch.setitem(attention_check._TOLERANCE, BF16, 0.015)  # half the usual tolerance
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=BF16).stored_as(kv_dtype)
    kernels = TritonKernels(is_exact=False, is_specialized=is_specialized, dequantizes_first="always")
    dequantized_pools = []

    def recorded_dequantize(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> KVPool:
        dequantized_pools.append(dequantize_blocks(pool, layer, block_ids, dtype))
        return dequantized_pools[-1]

    monkeypatch.setattr("radixkv.model.attention.triton_kernels.dequantize_blocks", recorded_dequantize)
    check_attention(kernels, AttentionUse((AttentionKind(2, 100, 30.0),), BF16, shape, 64, CPU, is_exact=False))
    assert {pool.dtype for pool in dequantized_pools} == {BF16}, "blocks were dequantized before attention"


@pytest.mark.long
def test_a_trial_detects_wrong_dequantization(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interpret_kernels(monkeypatch)

    def dequantize_wrong_blocks(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> KVPool:
        return dequantize_blocks(pool, layer, block_ids.roll(1), dtype)

    monkeypatch.setattr("radixkv.model.attention.triton_kernels.dequantize_blocks", dequantize_wrong_blocks)
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=32, dtype=BF16).stored_as("int8")
    use = AttentionUse((KIND,), BF16, shape, 64, CPU, is_exact=False)
    kernels_by_name = candidates(use, (8, 0))
    chosen = try_candidates(kernels_by_name, lambda name: try_attention_here(name, use))
    assert chosen == "attention through pointers"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention over blocks dequantized first is not used: attention over int8")


def test_on_a_gpu_only_kernels_that_suit_the_gpu_and_the_pool_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[object] = []

    def refuse(*trial: object) -> None:
        trials.append(trial)
        raise UnsupportedModel("the trial failed")

    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=BF16)
    model: Any = SimpleNamespace(device=torch.device("cuda"), is_exact=True)
    model.attention_uses = lambda shape, block_size: (
        AttentionUse((KIND,), BF16, shape, block_size, model.device, model.is_exact),
    )
    assert isinstance(choose_attention_kernels(model, shape, 64, refuse), TritonKernels)
    assert trials == [("warp-specialized attention", *model.attention_uses(shape, 64))]
    trials.clear()
    assert isinstance(choose_attention_kernels(model, shape.stored_as("int8"), 64, refuse), TritonKernels)
    assert trials == [], "only one kind of kernels suits an int8 pool in exact mode, so they need no trial"
    model.is_exact = False
    kernels = choose_attention_kernels(model, shape.stored_as("int8"), 64, lambda *_: None)
    assert isinstance(kernels, TritonKernels)
    assert kernels._dequantizes_first == "if faster"
    assert kernels._capacity == DeviceCapacity(114, head_dim=64)


def model_on_a_cpu(dtype: torch.dtype) -> tuple[Any, KVShape]:
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=dtype)
    model: Any = SimpleNamespace(device=CPU, is_exact=True)
    model.attention_uses = lambda shape, block_size: (AttentionUse((KIND,), dtype, shape, block_size, CPU, True),)
    return model, shape


@pytest.fixture
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine without the library have native kernels, which compute what torch does."""
    monkeypatch.setattr(on_cpu, "native_library", lambda: ctypes.CDLL(None))
    monkeypatch.setattr(on_cpu, "NativeKernels", lambda library: FakeNativeKernels())


class FakeNativeKernels(SpoiledKernels):
    """Correct kernels of another class than `TorchKernels`."""


@pytest.mark.usefixtures("native_kernels")
def test_on_a_cpu_native_kernels_are_used() -> None:
    for dtype in (torch.float32, BF16):
        assert isinstance(choose_attention_kernels(*model_on_a_cpu(dtype), 16), FakeNativeKernels)


@pytest.mark.usefixtures("native_kernels")
def test_on_a_cpu_torch_is_used_if_native_kernels_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_cpu, "NativeKernels", lambda library: WrongNumbers())
    assert type(choose_attention_kernels(*model_on_a_cpu(BF16), 16)) is TorchKernels
    assert caplog.messages[0].startswith("native attention is not used: attention over bf16 on cpu: expected")


@pytest.mark.usefixtures("native_kernels")
def test_on_a_cpu_the_environment_may_exclude_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_REFUSED_ATTENTION", "native attention")
    assert type(choose_attention_kernels(*model_on_a_cpu(BF16), 16)) is TorchKernels


def test_kernels_excluded_by_the_environment_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("kernels were tried")

    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setenv("RADIXKV_REFUSED_ATTENTION", "warp-specialized attention")
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=BF16)
    model: Any = SimpleNamespace(device=torch.device("cuda"), is_exact=True)
    model.attention_uses = lambda shape, block_size: (
        AttentionUse((KIND,), BF16, shape, block_size, model.device, True),
    )
    kernels = choose_attention_kernels(model, shape, 64, refuse)
    assert isinstance(kernels, TritonKernels)
    assert not kernels._is_specialized
    assert caplog.messages == ["warp-specialized attention is not used: RADIXKV_REFUSED_ATTENTION refuses it"]
