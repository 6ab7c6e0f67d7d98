import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from radixkv.blocks import BlockCopy
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.dequantize_plan import plan_dequantize
from radixkv.kernels.gpu.linear import linear
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionUse
from radixkv.model.attention.triton_kernels import TritonKernels, candidates
from radixkv.model.exactness import ExactFunctions, pointwise_functions
from radixkv.model.exactness_on_gpu import row_functions
from radixkv.model.loading import load_model
from radixkv.storage.device_pool import KVShape, KVStorage
from tests.kernels.gpu.interpreter import interpret_kernels
from tests.model.exact.checkpoints import CONFIGS, LAGUNA, VOCAB_SIZE, load_eager, write_checkpoint
from tests.model.exact.exact_cases import MODELS


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "laguna"])
def test_a_whole_model_on_triton_kernels_agrees_with_eager_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma2 alternates layers with and without a window, and Laguna the query heads, so a step has several plans."""
    if not torch.cuda.is_available():
        interpret_kernels(monkeypatch)
    directory = write_checkpoint({**MODELS, "laguna": LAGUNA}[family], tmp_path)
    model = load_model(ModelConfig(path=str(directory)))
    storage = KVStorage(16, 16, model.kv_shape, model.device)
    storage.pool.blocks.fill_(0xFF)
    runner = Runner(model, storage, TritonKernels(is_exact=False))
    first, second, third = (np.random.default_rng(seed).integers(0, VOCAB_SIZE, 50).astype("<u4") for seed in (0, 1, 2))
    second[:21] = third[:21] = first[:21]
    table = np.random.default_rng(2).permutation(16).astype(np.int32)
    runner.run([Chunk(first.tobytes(), 0, 30, table[:4], None, wants_logits=False)])
    # The other prompts share 21 tokens: one block, and 5 slots of another block, which is copied.
    sharing_tables = [np.concatenate([table[:1], own]) for own in (table[4:7], table[7:10])]
    copies = [BlockCopy(int(table[1]), int(sharing_table[1])) for sharing_table in sharing_tables]
    step = runner.run(
        [
            Chunk(first.tobytes(), 30, 50, table[:4], None, wants_logits=True),
            Chunk(second.tobytes(), 21, 50, sharing_tables[0], copies[0], wants_logits=True),
            Chunk(third.tobytes(), 21, 50, sharing_tables[1], copies[1], wants_logits=True),
        ]
    )
    assert step.is_finite == [True, True, True]
    oracle = load_eager(directory)
    for row, tokens in zip(step.logits, (first, second, third), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0, -1]
        assert (row.cpu() - expected).abs().max() <= 1e-4


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [("llama", "float32", "auto"), ("gemma2", "bfloat16", "int8")],
)
def test_in_exact_mode_no_bit_depends_on_what_was_cached_or_on_the_batch(
    family: str, dtype: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(CONFIGS[family], tmp_path)
    model = load_model(ModelConfig(path=str(directory), dtype=dtype))
    if not torch.cuda.is_available():
        interpret_kernels(monkeypatch)
        model._exact_mode = ExactFunctions(pointwise_functions() | {functional.linear: linear} | row_functions())
    storage = KVStorage(16, 16, model.kv_shape.stored_as(kv_dtype), model.device)
    storage.pool.blocks.fill_(0xFF)
    runner = Runner(model, storage, TritonKernels(is_exact=True))
    mine, other = (np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).astype("<u4").tobytes() for seed in (0, 1))
    cold, warm, other_table = (np.arange(start, start + 4, dtype=np.int32) for start in (0, 4, 8))
    at_once = runner.run([Chunk(mine, 0, 60, cold, None, wants_logits=True)]).logits[0]
    runner.run([Chunk(mine, 0, 23, warm, None, wants_logits=False)])
    runner.run([Chunk(mine, 23, 24, warm, None, wants_logits=False)])
    chunked = runner.run(
        [
            Chunk(other, 0, 41, other_table, None, wants_logits=True),
            Chunk(mine, 24, 60, warm, None, wants_logits=True),
        ]
    ).logits[1]
    assert torch.equal(at_once, chunked)
    kv = storage.pool.values.view(torch.uint8)
    assert torch.equal(kv[:3], kv[4:7])
    assert torch.equal(kv[3, ..., :12, :], kv[7, ..., :12, :])


def test_in_exact_mode_tiles_and_splits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def attend(*inputs: object, **options: object) -> None:
        plans.append(inputs[4])

    monkeypatch.setattr("radixkv.kernels.gpu.attention.paged_attention", attend)
    pool = KVPool.allocate(80, 1, 2, 64, 16, dtype=torch.bfloat16)
    kernels = TritonKernels(is_exact=True)
    for query_len, kv_len in ((1, 5000), (700, 5000), (5000, 5000)):
        batch = PagedBatch.build([query_len], [kv_len], [np.arange(80, dtype=np.int32)], 64)
        query = torch.zeros(query_len, 4, 16, dtype=torch.bfloat16)
        kernels.paged_attention(query, pool, 0, batch, Scoring(1.0))
    assert {plan.tile_rows for plan in plans} == {128}
    for plan in plans:
        first_row = plan.work[:, 4]
        keys_of_last_tile = plan.work[first_row == first_row.max(), 5:7]  # first and end key of each split
        assert keys_of_last_tile.sort(dim=0).values.tolist() == [[0, 2048], [2048, 4096], [4096, 5000]]


def test_layers_share_a_plan_if_they_have_as_many_query_heads_and_the_same_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []
    monkeypatch.setattr("radixkv.kernels.gpu.attention.paged_attention", lambda *inputs, **_: plans.append(inputs[4]))
    pool = KVPool.allocate(2, 4, 2, 64, 16, dtype=torch.bfloat16)
    batch = PagedBatch.build([20], [100], [np.arange(2, dtype=np.int32)], 64)
    kernels = TritonKernels(is_exact=False)
    for layer, (num_query_heads, window) in enumerate(((4, None), (8, None), (8, 50), (4, None))):
        query = torch.zeros(20, num_query_heads, 16, dtype=torch.bfloat16)
        kernels.paged_attention(query, pool, layer, batch, Scoring(1.0, window))
    assert [(plan.group_size, plan.window) for plan in plans] == [(2, None), (4, None), (4, 50), (2, None)]
    assert plans[0] is plans[3]


@pytest.mark.parametrize(("is_exact", "expected"), [(True, [True, True]), (False, [False, True])])
def test_warps_specialize_if_tiles_have_enough_rows(
    is_exact: bool, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode, tiles always have enough rows, so warps specialize in any batch."""
    chosen = []

    def attend(*inputs: object, is_specialized: bool, **options: object) -> None:
        chosen.append(is_specialized)

    monkeypatch.setattr("radixkv.kernels.gpu.attention.paged_attention", attend)
    pool = KVPool.allocate(2, 1, 2, 64, 64, dtype=torch.bfloat16)
    for is_specialized in (False, True):
        kernels = TritonKernels(is_exact=is_exact, is_specialized=is_specialized)
        for query_len in (1, 100):
            batch = PagedBatch.build([query_len], [100], [np.arange(2, dtype=np.int32)], 64)
            query = torch.zeros(query_len, 4, 64, dtype=torch.bfloat16)
            kernels.paged_attention(query, pool, 0, batch, Scoring(1.0))
    assert chosen == [False, False, *expected]


@pytest.mark.long
def test_a_whole_model_agrees_with_and_without_dequantizing_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig(path=str(write_checkpoint(CONFIGS["gemma2"], tmp_path)), dtype="bfloat16"))
    if not torch.cuda.is_available():
        interpret_kernels(monkeypatch)
    prompts = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).astype("<u4") for seed in (0, 1)]
    prompts[1][:32] = prompts[0][:32]
    tables = [np.array(blocks, dtype=np.int32) for blocks in ([5, 2, 7, 0], [5, 2, 1, 3])]
    answers = []
    for dequantizes_first in ("never", "always"):
        storage = KVStorage(8, 16, model.kv_shape.stored_as("int8"), model.device)
        storage.pool.blocks.fill_(0xFF)
        runner = Runner(model, storage, TritonKernels(is_exact=False, dequantizes_first=dequantizes_first))
        runner.run([Chunk(prompts[0].tobytes(), 0, 40, tables[0], None, wants_logits=False)])
        suffixes = ((prompts[0], 40, tables[0]), (prompts[1], 32, tables[1]))
        chunks = [
            Chunk(tokens.tobytes(), start, 60, table, None, wants_logits=True) for tokens, start, table in suffixes
        ]
        step = runner.run(chunks)
        assert step.is_finite == [True, True]
        answers.append(step.logits)
    dequantized_in_attention, dequantized_first = answers
    difference = (dequantized_first - dequantized_in_attention).norm() / dequantized_in_attention.norm()
    assert 0 < difference < 0.02


def attended_dtypes(
    kernels: TritonKernels, query_lens: list[int], monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]
) -> list[torch.dtype]:
    """Return the dtypes of the pools that attention reads: for each window, in two layers.

    The requests share a prefix of 8,192 tokens.
    """
    pools: list[KVPool] = []

    def attend(query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, *_: object, **__: object) -> None:
        assert int(batch.block_tables.max()) < pool.blocks.shape[0]
        pools.append(pool)

    def dequantize(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> KVPool:
        return KVPool.allocate(len(block_ids), 1, 2, 64, 16, dtype=dtype)

    monkeypatch.setattr("radixkv.kernels.gpu.attention.paged_attention", attend)
    monkeypatch.setattr("radixkv.model.attention.triton_kernels.dequantize_blocks", dequantize)
    pool = KVPool.allocate(300, 2, 2, 64, 16, dtype=torch.int8)
    tables = len(query_lens) * [np.arange(300, dtype=np.int32)]
    batch = PagedBatch.build(query_lens, [8192 + query_len for query_len in query_lens], tables, 64)
    query = torch.zeros(batch.num_tokens, 8, 16, dtype=torch.bfloat16)
    for window in windows:
        for layer in range(2):
            kernels.paged_attention(query, pool, layer, batch, Scoring(1.0, window, None))
    return [pool.dtype for pool in pools]


@pytest.mark.parametrize(
    ("dequantizes_first", "query_lens", "expected"),
    [
        ("never", [2048], torch.int8),
        ("if faster", [2048], torch.bfloat16),
        ("if faster", [200, 200, 100, 1], torch.bfloat16),
        ("if faster", [200], torch.int8),
        ("if faster", [1, 1], torch.int8),
        ("always", [1, 1], torch.bfloat16),
    ],
)
def test_blocks_are_dequantized_first_as_configured(
    dequantizes_first: Any, query_lens: list[int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = TritonKernels(is_exact=False, dequantizes_first=dequantizes_first)
    assert attended_dtypes(kernels, query_lens, monkeypatch, windows=(None,)) == 2 * [expected]


def test_dequantization_is_planned_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_windows = []

    def plan(*inputs: object, window: int | None, **options: Any) -> object:
        planned_windows.append(window)
        return plan_dequantize(*inputs, window=window, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("radixkv.model.attention.triton_kernels.plan_dequantize", plan)
    kernels = TritonKernels(is_exact=False, dequantizes_first="if faster")
    dtypes = attended_dtypes(kernels, [2048], monkeypatch, windows=(None, 100))
    assert dtypes == 2 * [torch.bfloat16] + 2 * [torch.int8]
    assert planned_windows == [None, 100]


def test_blocks_are_dequantized_first_only_if_that_is_faster_and_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = TritonKernels(is_exact=False, is_specialized=True, dequantizes_first="always").for_service()
    assert attended_dtypes(tried, [2048], monkeypatch, windows=(None,)) == 2 * [torch.bfloat16]
    assert attended_dtypes(tried, [1], monkeypatch, windows=(None,)) == 2 * [torch.int8]
    untried = TritonKernels(is_exact=False, has_idle_work=True).for_service()
    assert attended_dtypes(untried, [2048], monkeypatch, windows=(None,)) == 2 * [torch.int8]
    assert not untried._has_idle_work


def test_exact_mode_does_not_dequantize_first() -> None:
    with pytest.raises(AssertionError):
        TritonKernels(is_exact=True, dequantizes_first="if faster")


POINTERS, SPECIALIZED = "attention through pointers", "warp-specialized attention"
PLAIN, SPECIALIZED_PLAIN = (
    "attention over blocks dequantized first",
    "warp-specialized attention over blocks dequantized first",
)


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "block_size", "names_exact", "names_fast"),
    [
        ((9, 0), "auto", 64, [SPECIALIZED, POINTERS], [SPECIALIZED, POINTERS]),
        ((9, 0), "auto", 32, [POINTERS], [POINTERS]),
        ((8, 0), "auto", 64, [POINTERS], [POINTERS]),
        ((9, 0), "fp8", 64, [POINTERS], [SPECIALIZED_PLAIN, PLAIN, POINTERS]),
        ((9, 0), "k8v4", 32, [POINTERS], [PLAIN, POINTERS]),
        ((8, 0), "int8", 64, [POINTERS], [PLAIN, POINTERS]),
    ],
)
def test_kernels_that_suit_gpu_pool_and_mode_are_tried_and_pointers_are_the_fallback(
    capability: tuple[int, int], kv_dtype: str, block_size: int, names_exact: list[str], names_fast: list[str]
) -> None:
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16).stored_as(kv_dtype)
    in_exact_mode = AttentionUse((), torch.bfloat16, shape, block_size, torch.device("cuda"), is_exact=True)
    in_fast_mode = dataclasses.replace(in_exact_mode, is_exact=False)
    assert list(candidates(in_exact_mode, capability)) == names_exact
    assert list(candidates(in_fast_mode, capability)) == names_fast
    assert list(candidates(dataclasses.replace(in_fast_mode, dtype=torch.float32), capability)) == [POINTERS]
