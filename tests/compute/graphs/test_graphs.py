"""Captured steps on a CPU: a replay repeats the captured calls over the memory that a graph would read."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerateResult
from radixkv.api.sampling import Sampling
from radixkv.blocks import BlockCopy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute import runner as runner_module
from radixkv.compute.forward import Chunk, StepLayout, StepOutputs, compute_step, lay_out, pack_tokens
from radixkv.compute.graphs import shapes as step_shape
from radixkv.compute.graphs.buffers import StepBuffers
from radixkv.compute.graphs.graphs import Replay, StepGraphs
from radixkv.compute.graphs.shapes import StepShape, step_shapes
from radixkv.compute.runner import Runner, StepResult
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.gpu.linear import linear
from radixkv.kernels.staging import StagedArrays
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.triton_kernels import TritonKernels
from radixkv.model.exactness import ExactFunctions, pointwise_functions
from radixkv.model.exactness_on_gpu import row_functions
from radixkv.model.model import Model
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.startup.graph_check import drop_wrong_graphs
from radixkv.storage.device_pool import KVStorage
from tests.kernels.gpu.interpreter import interpret_kernels
from tests.model.exact.checkpoints import CONFIGS, LAGUNA, VOCAB_SIZE, write_checkpoint

# The attention output of padding rows is what their memory held before. The interpreter warns if it overflows
# in further computations; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BLOCK_SIZE = 16
MAX_TOKENS = 128


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch few programs: in the interpreter, each takes milliseconds, even if it has nothing to do."""
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(TritonKernels, "max_partials", lambda *_: 6)
    monkeypatch.setattr(step_shape, "_EXACT_PARTIALS", (6,))


class Captured:
    """Imitates a CUDA graph: a replay computes the step again, and writes to the output tensors of the capture."""

    def __init__(self, compute: Callable[[], StepOutputs]) -> None:
        self.num_replays = 0
        self._compute = compute
        self._outputs = StepOutputs(*(each.clone() for each in compute()))

    def __call__(self) -> StepOutputs:
        self.num_replays += 1
        for output, new_output in zip(self._outputs, self._compute(), strict=True):
            output.copy_(new_output)
        return self._outputs


class Capturer:
    """Captures steps as fake graphs, and keeps these."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []

    def __call__(self, compute: Callable[[], StepOutputs]) -> Captured:
        self.captured.append(Captured(compute))
        return self.captured[-1]

    @property
    def num_replays(self) -> int:
        return sum(each.num_replays for each in self.captured)


def load(family: str, folder: Path, *, is_exact: bool = False) -> Model:
    """Create a model of one layer, or of two that differ (Gemma2, Laguna), as it runs on a GPU."""
    config = copy.deepcopy(LAGUNA if family == "laguna" else CONFIGS[family])
    config.num_hidden_layers = 2 if family in ("gemma2", "laguna") else 1
    for name in ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer"):
        if (by_layer := getattr(config, name, None)) is not None:
            setattr(config, name, by_layer[: config.num_hidden_layers])
    directory = write_checkpoint(config, folder)
    module = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=ATTENTION_NAME)
    model = Model(family, module, torch.device("cpu"), is_exact=is_exact, is_fused=False)
    if is_exact:
        model._exact_mode = ExactFunctions(pointwise_functions() | {functional.linear: linear} | row_functions())
    return model


def capture(
    model: Model,
    storage: KVStorage,
    kernels: TritonKernels,
    capturer: Any = None,
    *,
    max_tokens: int = 16,
    max_requests: int = 4,
    max_sequence_tokens: int = MAX_TOKENS,
    only_largest: bool = False,
) -> StepGraphs:
    """Capture the steps of a model up to these sizes, with the fake `Capturer` unless another one is given."""
    return StepGraphs(
        model,
        storage,
        kernels,
        max_sequence_tokens=max_sequence_tokens,
        max_step_tokens=max_tokens,
        max_requests=max_requests,
        capturer=capturer or Capturer(),
        only_largest=only_largest,
    )


def poisoned_storage(model: Model, num_blocks: int = 24) -> KVStorage:
    """Return K/V memory full of NaN, so that reading a slot that was never written makes the results NaN."""
    storage = KVStorage(num_blocks, BLOCK_SIZE, model.kv_shape, model.device)
    storage.pool.blocks.fill_(0xFF)
    return storage


def random_tokens(seed: int) -> bytes:
    """Return the bytes of `MAX_TOKENS` random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, MAX_TOKENS).astype("<u4").tobytes()


def steps_of_three_requests() -> Iterator[list[Chunk]]:
    """Yield the chunks of three steps: a prompt, two prompts that reuse 21 of its tokens, and the next tokens of all.

    The prompts share the first block, and copy the second one, in which they diverge.
    """
    first, second, third = (random_tokens(seed) for seed in (0, 1, 2))
    shared_bytes = 21 * 4
    second = first[:shared_bytes] + second[shared_bytes:]
    third = first[:shared_bytes] + third[shared_bytes:]
    block_ids = np.random.default_rng(3).permutation(24).astype(np.int32)
    first_table = block_ids[:4]
    second_table, third_table = (np.concatenate((block_ids[:1], block_ids[start : start + 3])) for start in (4, 7))
    second_copy, third_copy = (BlockCopy(int(block_ids[1]), int(table[1])) for table in (second_table, third_table))
    yield [Chunk(first, 0, 23, first_table, None, wants_logits=True)]
    yield [
        Chunk(second, 21, 27, second_table, second_copy, wants_logits=False),
        Chunk(third, 21, 24, third_table, third_copy, wants_logits=True),
    ]
    yield [
        Chunk(first, 23, 24, first_table, None, wants_logits=True),
        Chunk(third, 24, 25, third_table, None, wants_logits=True),
        Chunk(second, 27, 36, second_table, None, wants_logits=True),
    ]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", ["gemma2", "laguna"])
def test_captured_steps_agree_with_launched_ones(family: str, tmp_path: Path) -> None:
    """The layers differ in their windows or in their numbers of query heads, so that a step has two attention plans."""
    model = load(family, tmp_path)
    storages, capturer = [poisoned_storage(model), poisoned_storage(model)], Capturer()
    kernels = TritonKernels(is_exact=False)
    runners = [
        Runner(model, storages[0], kernels, capture(model, storages[0], kernels, capturer)),
        Runner(model, storages[1], kernels),
    ]
    num_replays = []
    for chunks in steps_of_three_requests():
        got, expected = (runner.run(chunks) for runner in runners)
        assert (got.logits - expected.logits).abs().max() <= 1e-4
        assert got.most_likely == expected.most_likely
        assert got.is_finite == expected.is_finite == [True] * len(chunks)
        num_replays.append(capturer.num_replays)
    assert num_replays == [0, 1, 2], "23 tokens exceed every captured step; the other two steps fit"


def test_in_exact_mode_captured_steps_are_bitwise_identical_to_launched_ones(tmp_path: Path) -> None:
    model = load("llama", tmp_path, is_exact=True)
    storages, capturer = [poisoned_storage(model), poisoned_storage(model)], Capturer()
    kernels = TritonKernels(is_exact=True)
    runners = [
        Runner(model, storages[0], kernels, capture(model, storages[0], kernels, capturer)),
        Runner(model, storages[1], kernels),
    ]
    for chunks in steps_of_three_requests():
        got, expected = (runner.run(chunks) for runner in runners)
        assert torch.equal(got.logits, expected.logits)
    assert torch.equal(storages[0].pool.blocks, storages[1].pool.blocks), "padding is written nowhere"
    assert capturer.num_replays == 2


def test_captured_steps_join_rows_of_requests_that_share_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step joins no rows, and is not affected by those that the step before it joined."""
    monkeypatch.setattr("radixkv.model.attention.triton_kernels._SPLIT_TOKENS", 64)
    model = load("llama", tmp_path, is_exact=True)
    storages, capturer = [poisoned_storage(model), poisoned_storage(model)], Capturer()
    kernels, num_joined_rows = TritonKernels(is_exact=True), []
    fill = StepBuffers.fill

    def count_and_fill(
        buffers: StepBuffers, shape: StepShape, layout: StepLayout, plans: dict[Any, AttentionPlan]
    ) -> None:
        (plan,) = plans.values()
        num_joined_rows.append(len(plan.joined_rows))
        fill(buffers, shape, layout, plans)

    monkeypatch.setattr(StepBuffers, "fill", count_and_fill)
    graphs = capture(model, storages[0], kernels, capturer, max_tokens=4)
    runners = [Runner(model, storages[0], kernels, graphs), Runner(model, storages[1], kernels)]
    tokens, block_ids = random_tokens(0), np.random.default_rng(3).permutation(24).astype(np.int32)
    tables = [np.append(block_ids[:5], block_ids[index]) for index in (5, 6, 7)]
    for chunks, num_joined_requests in (
        ([Chunk(tokens, 0, 80, tables[0], None, wants_logits=False)], None),
        ([Chunk(tokens, 80, 81, table, None, wants_logits=True) for table in tables], 3),
        ([Chunk(tokens, 81, 82, tables[2], None, wants_logits=True)], 0),
    ):
        got, expected = (runner.run(chunks) for runner in runners)
        assert torch.equal(got.logits, expected.logits)
        if num_joined_requests is not None:  # the first step is too large to be captured
            group_size = model.attention_kinds[0].num_query_heads // model.kv_shape.num_kv_heads
            assert num_joined_rows.pop() == num_joined_requests * group_size
    assert capturer.num_replays == 2


def test_a_step_with_more_rows_of_logits_than_requests_is_launched(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    storage, capturer, kernels = poisoned_storage(model), Capturer(), TritonKernels(is_exact=False)
    graphs = capture(model, storage, kernels, capturer, max_tokens=4)
    chunk = Chunk(random_tokens(0), 0, 4, np.arange(2, dtype=np.int32), None, wants_logits=True)
    chunk_with_all_logits = dataclasses.replace(chunk, wants_all_logits=True)
    assert graphs.prepare(lay_out([chunk], storage.block_size)) is not None
    assert graphs.prepare(lay_out([chunk_with_all_logits], storage.block_size)) is None
    result = Runner(model, storage, kernels, graphs).run([chunk_with_all_logits])
    assert len(result.logits) == len(result.most_likely) == 4
    last = Runner(model, storage, kernels).run([chunk])
    torch.testing.assert_close(result.logits[-1:], last.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_step_may_be_prepared_before_its_tokens_are_known(
    is_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is prepared while the previous one is computed. One that is never started leaves nothing behind."""
    filled_shapes: list[StepShape] = []
    fill = StepBuffers.fill

    def record_and_fill(buffers: StepBuffers, shape: StepShape, *args: Any) -> None:
        filled_shapes.append(shape)
        fill(buffers, shape, *args)

    monkeypatch.setattr(Runner, "is_asynchronous", True)
    monkeypatch.setattr(StepBuffers, "fill", record_and_fill)
    model = load("llama", tmp_path)
    kernels, capturer = TritonKernels(is_exact=False), Capturer()
    storages = [poisoned_storage(model), poisoned_storage(model)]
    graphs = capture(model, storages[0], kernels, capturer) if is_captured else None
    runner, reference = Runner(model, storages[0], kernels, graphs), Runner(model, storages[1], kernels)
    first, second, last = steps_of_three_requests()
    expected = [reference.run(chunks) for chunks in (first, second, last)]
    runner.run(first)
    wait = runner.start(second)
    runner.prepare([dataclasses.replace(chunk, tokens=b"") for chunk in last[:1]])  # never started
    launch = runner.prepare([dataclasses.replace(chunk, tokens=b"") for chunk in last])
    num_filled = 3 if is_captured else 0  # `second`, the step that is never started, and `last`
    assert len(filled_shapes) == num_filled, "the host has written all inputs except the tokens"
    assert (wait().logits - expected[1].logits).abs().max() <= 1e-4
    assert (launch(pack_tokens(last))().logits - expected[2].logits).abs().max() <= 1e-4
    assert capturer.num_replays == 2 * is_captured
    assert len(filled_shapes) == num_filled


def test_a_value_that_is_not_finite_fails_its_own_request(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    storage, kernels, capturer = poisoned_storage(model), TritonKernels(is_exact=False), Capturer()
    runner = Runner(model, storage, kernels, capture(model, storage, kernels, capturer))
    bad, good = random_tokens(0), random_tokens(1)
    blocks = np.arange(2, dtype=np.int32)
    model.module.get_input_embeddings().weight[np.frombuffer(bad, "<u4")[1]] = torch.nan
    step = runner.run(
        [
            Chunk(good, 0, 2, blocks[:1], None, wants_logits=True),
            Chunk(bad, 0, 2, blocks[1:], None, wants_logits=True),
        ]
    )
    assert step.is_finite == [True, False]
    assert step.logits.shape == (2, VOCAB_SIZE)
    assert capturer.num_replays == 1


def test_the_smallest_captured_step_with_room_is_used(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    storage, kernels, capturer = poisoned_storage(model), TritonKernels(is_exact=False), Capturer()
    storage.pool.blocks.fill_(0)  # what is cached
    graphs = capture(model, storage, kernels, capturer, max_tokens=32)
    sizes = [(shape.num_tokens, shape.num_requests) for shape in graphs.shapes]
    assert sizes == [(1, 1), (2, 2), (4, 4), (16, 4), (32, 4)]

    def replayed(*requests: tuple[int, int]) -> tuple[int, int] | None:
        """Return the size of the step that is replayed for requests with these numbers of new and cached tokens."""
        chunks = []
        for index, (num_new, num_cached) in enumerate(requests):
            block_ids = np.arange(6 * index, 6 * index + 6, dtype=np.int32)
            end = num_cached + num_new
            chunks.append(Chunk(random_tokens(0), num_cached, end, block_ids, None, wants_logits=False))
        num_replays_before = [each.num_replays for each in capturer.captured]
        replay = graphs.prepare(lay_out(chunks, BLOCK_SIZE))
        if replay is None:
            return None
        replay(pack_tokens(chunks))
        num_replays_after = [each.num_replays for each in capturer.captured]
        for size, before, after in zip(reversed(sizes), num_replays_before, num_replays_after, strict=True):
            if after > before:  # the largest step was captured first
                return size
        raise AssertionError("no step was replayed")

    assert replayed((1, 5)) == (1, 1)
    assert replayed((1, 5), (1, 80)) == (2, 2)
    assert replayed((1, 5), (2, 0)) == (4, 4)
    assert replayed((5, 0)) == (16, 4)
    assert replayed((16, 70)) == (16, 4)
    assert replayed((17, 0), (1, 1)) == (32, 4)
    assert replayed((33, 0)) is None
    assert replayed((33, 3), (1, 1)) is None


def test_a_step_whose_plan_is_too_long_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.attention.triton_kernels._SPLIT_TOKENS", 64)
    model = load("llama", tmp_path)
    storage, kernels = poisoned_storage(model, 32), TritonKernels(is_exact=True)
    storage.pool.blocks.fill_(0)  # what is cached
    graphs = StepGraphs(
        model,
        storage,
        kernels,
        max_sequence_tokens=512,
        max_step_tokens=1,
        max_requests=1,
        capturer=Capturer(),
    )
    tokens = bytes(512 * 4)
    # With the new token, the contexts have seven and eight splits of 64 tokens.
    for num_cached, has_room in ((7 * 64 - 1, True), (7 * 64, False)):
        chunk = Chunk(tokens, num_cached, num_cached + 1, np.arange(32, dtype=np.int32), None, wants_logits=True)
        assert (graphs.prepare(lay_out([chunk], BLOCK_SIZE)) is not None) == has_room


def shapes_of(dtype: torch.dtype, *, is_exact: bool, max_tokens: int = 128, max_requests: int = 64) -> list[StepShape]:
    """Return the shapes of captured steps of a model with 32 query heads and 8 KV heads."""
    kernels = TritonKernels(is_exact=is_exact)
    return step_shapes(kernels, dtype, 32, 8, max_tokens=max_tokens, max_requests=max_requests)


def test_the_largest_step_may_be_captured_alone(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    storage, kernels = poisoned_storage(model), TritonKernels(is_exact=False)
    shapes = capture(model, storage, kernels, max_tokens=16, max_requests=4).shapes
    alone = capture(model, storage, kernels, max_tokens=16, max_requests=4, only_largest=True).shapes
    assert alone == [max(shapes)]


def test_shapes_double_and_keep_within_the_limits() -> None:
    def sizes(*args: Any, **limits: Any) -> list[Any]:
        return [(shape.num_tokens, shape.num_requests, shape.tile_rows) for shape in shapes_of(*args, **limits)]

    bf16 = torch.bfloat16
    decoding = [(1, 1, 16), (2, 2, 16), (4, 4, 16), (8, 8, 16)]
    assert sizes(bf16, is_exact=False, max_requests=8) == [
        *decoding,
        *[(16, 4, 64), (16, 8, 64), (32, 4, 128), (32, 8, 128), (64, 4, 128), (64, 8, 128), (128, 4, 128)],
        (128, 8, 128),
    ]
    assert sizes(bf16, is_exact=True, max_requests=1) == [(n, 1, 128) for n in (1, 16, 32, 64, 128)]
    assert sizes(torch.float32, is_exact=False, max_tokens=20, max_requests=2) == [(1, 1, 16), (2, 2, 16), (16, 2, 16)]
    assert max(sizes(bf16, is_exact=False, max_requests=500))[:2] == (128, 64)


@pytest.mark.parametrize(
    ("query_lens", "context", "num_tokens"),
    [
        ([1], 131_072, 1),
        (2 * [1], 100_000, 2),
        (4 * [1], 131_072, 4),
        (8 * [1], 32_768, 8),
        (64 * [1], 8192, 64),
        ([64], 32_768, 64),
        ([100, 1, 1], 65_536, 128),
    ],
)
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("window", [None, 4096])
def test_long_contexts_have_room_in_steps_of_their_size(
    query_lens: list[int],
    context: int,
    num_tokens: int,
    is_exact: bool,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model has 32 query heads, 8 KV heads, bfloat16 queries, and blocks of 64 tokens."""
    monkeypatch.undo()  # the small limits of the other tests
    kernels, dtype = TritonKernels(is_exact=is_exact), torch.bfloat16
    num_blocks = -(-(context + max(query_lens)) // 64)  # per request
    tables = list(np.arange(len(query_lens) * num_blocks, dtype=np.int32).reshape(-1, num_blocks))
    batch = PagedBatch.build(query_lens, [context + query_len for query_len in query_lens], tables, 64)
    min_tile_rows = kernels.tile_rows(4 * max(query_lens), dtype)
    for shape in shapes_of(dtype, is_exact=is_exact):
        plan = kernels.plan(batch, 32, 8, dtype, window=window, tile_rows=shape.tile_rows)
        if shape.tile_rows >= min_tile_rows and shape.has_room(batch) and shape.has_room_for(plan):
            break
    assert shape.num_tokens == num_tokens
    assert shape.has_room_for(plan)


@pytest.mark.parametrize(
    ("query_lens", "context", "tile_rows", "num_tokens", "num_tokens_exact"),
    [
        ([1, 1], 100_000, 16, 2, 2),
        (8 * [1], 8192, 64, 16, 8),
        (64 * [1], 8192, 128, 64, 64),
        (64 * [1], 131_072, 128, 64, 64),
        ([3, *40 * [1]], 32_768, 128, 64, 64),
    ],
)
@pytest.mark.parametrize("is_exact", [True, False])
def test_steps_that_share_long_contexts_fit_into_larger_tiles(
    query_lens: list[int],
    context: int,
    tile_rows: int,
    num_tokens: int,
    num_tokens_exact: int,
    is_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In exact mode tiles always have 128 rows, and the smallest shape is large enough."""
    monkeypatch.undo()  # the small limits of the other tests
    kernels, dtype = TritonKernels(is_exact=is_exact), torch.bfloat16
    num_shared_blocks = context // 64
    tables = [
        np.append(np.arange(num_shared_blocks), num_shared_blocks + index).astype(np.int32)
        for index in range(len(query_lens))
    ]
    context = num_shared_blocks * 64
    batch = PagedBatch.build(query_lens, [context + query_len for query_len in query_lens], tables, 64)
    rows = kernels.tile_rows_for(batch, 4, dtype, None)
    assert rows == (128 if is_exact else tile_rows)
    plan = kernels.plan(batch, 32, 8, dtype, window=None, tile_rows=rows)
    assert len(plan.joined_rows) == 4 * sum(query_lens)
    shapes = [shape for shape in shapes_of(dtype, is_exact=is_exact) if shape.tile_rows == rows]
    first = next(shape for shape in shapes if shape.has_room(batch) and shape.has_room_for(plan))
    assert first.num_tokens == (num_tokens_exact if is_exact else num_tokens)


def test_a_step_takes_larger_tiles_where_its_requests_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no captured step with larger tiles has room, one with smaller tiles is used."""
    model = load("llama", tmp_path)
    storage, kernels, used_tile_rows = poisoned_storage(model), TritonKernels(is_exact=False), []
    monkeypatch.setattr(TritonKernels, "tile_rows", lambda _, max_rows, dtype: 16 if max_rows <= 16 else 64)
    monkeypatch.setattr(TritonKernels, "tile_rows_for", lambda *_: 64)
    monkeypatch.setattr(StepBuffers, "fill", lambda _, shape, *__: used_tile_rows.append(shape.tile_rows))
    graphs = capture(model, storage, kernels, max_tokens=128, max_requests=2)
    assert {shape.tile_rows for shape in graphs.shapes} == {16, 64}
    table, tokens = np.arange(6, dtype=np.int32), random_tokens(0)
    chunks = [Chunk(tokens, 80, 81, table, None, wants_logits=True)] * 2
    assert graphs.prepare(lay_out(chunks, BLOCK_SIZE))
    for shape in graphs.shapes:
        if shape.tile_rows == 64:
            graphs.drop(shape)
    assert graphs.prepare(lay_out(chunks, BLOCK_SIZE))
    assert used_tile_rows == [64, 16]


class _FakeKernels:
    """Imitates the attention kernels, whose launches do not wait for the device. Computes nothing."""

    def write_kv(self, *_: object) -> None:
        pass

    def paged_attention(self, query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.empty_like(query)


class _MixedDeviceCalls(TorchDispatchMode):
    """Records calls that mix tensors of host and device. Calls that read a value raise: a tensor on `meta` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.mixed_calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.num_calls += 1
        tensors = [each for each in (*args, outputs) if isinstance(each, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.mixed_calls.append(str(func))
        return outputs


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_can_be_captured_since_it_does_not_synchronize(family: str, tmp_path: Path) -> None:
    """The device is `meta`, whose tensors have shapes and no values."""
    model = load(family, tmp_path)
    storage, meta = poisoned_storage(model, 1), torch.device("meta")
    model.module.to(meta)
    chunk = Chunk(random_tokens(0), 3, 10, np.zeros(1, dtype=np.int32), None, wants_logits=True)
    input_ids, layout = pack_tokens([chunk]).to(meta), lay_out([chunk], BLOCK_SIZE).to(meta)
    with _MixedDeviceCalls() as recorded:
        outputs = compute_step(model, storage, _FakeKernels(), input_ids, layout)  # type: ignore[arg-type]
    assert outputs.summary.shape == (8,)
    assert recorded.num_calls > 50
    assert recorded.mixed_calls == []


class TestCheckAtLoad:
    def test_correct_graphs_are_kept(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = load("gemma2", tmp_path)
        storage, kernels, capturer = poisoned_storage(model), TritonKernels(is_exact=False), Capturer()
        graphs = capture(model, storage, kernels, capturer, max_requests=2)
        shapes = graphs.shapes
        drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
        assert graphs.shapes == shapes
        assert not caplog.records
        assert {each.num_replays for each in capturer.captured} == {1}

    @pytest.mark.parametrize("max_sequence_tokens", [1, 20])
    def test_graphs_of_a_model_with_short_sequences_are_kept(
        self, max_sequence_tokens: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load("llama", tmp_path)
        storage, kernels = poisoned_storage(model), TritonKernels(is_exact=False)
        graphs = capture(model, storage, kernels, max_tokens=64, max_sequence_tokens=max_sequence_tokens)
        shapes = graphs.shapes
        drop_wrong_graphs(graphs, model, storage, kernels, max_sequence_tokens)
        assert graphs.shapes == shapes
        assert not caplog.records

    def test_graphs_too_large_for_the_pool_are_dropped(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = load("llama", tmp_path)
        storage, kernels = poisoned_storage(model, 2), TritonKernels(is_exact=False)
        graphs = capture(model, storage, kernels)
        drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
        assert [shape.num_tokens for shape in graphs.shapes] == [1, 2]
        assert "a captured step is not used, because the pool has too few blocks to check it: StepShape(" in caplog.text

    @pytest.mark.parametrize("is_exact", [True, False])
    def test_a_graph_that_does_not_read_its_inputs_is_dropped(
        self, is_exact: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load("llama", tmp_path, is_exact=is_exact)
        storage, kernels = poisoned_storage(model), TritonKernels(is_exact=is_exact)

        def replay_first_outputs(compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
            outputs = StepOutputs(*(each.clone() for each in compute()))
            return lambda: outputs

        graphs = capture(model, storage, kernels, replay_first_outputs, max_tokens=1, max_requests=2)
        shapes = graphs.shapes
        with caplog.at_level(logging.WARNING):
            drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
        assert graphs.shapes == []
        assert len(caplog.messages) == len(shapes)
        for shape, message in zip(shapes, caplog.messages, strict=True):
            assert message == f"a captured step is not used, because its results differ: {shape}"

    def test_a_shorter_context_is_checked_where_the_long_one_has_no_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("radixkv.model.attention.triton_kernels._SPLIT_TOKENS", 64)
        monkeypatch.setattr("radixkv.startup.graph_check._PREFIX_TOKENS", (480, 112))
        model = load("llama", tmp_path, is_exact=True)
        storage, kernels = poisoned_storage(model), TritonKernels(is_exact=True)
        graphs = capture(model, storage, kernels, max_tokens=1, max_requests=1)
        tried = []  # the number of tokens of the context, and whether the step has room for it
        prepare_as = graphs.prepare_as

        def prepare_and_record(shape: StepShape, layout: StepLayout) -> Replay | None:
            replay = prepare_as(shape, layout)
            tried.append((max(layout.batch.kv_lens), replay is not None))
            return replay

        monkeypatch.setattr(graphs, "prepare_as", prepare_and_record)
        drop_wrong_graphs(graphs, model, storage, kernels, 512)
        assert tried == [(481, False), (113, True)]
        assert len(graphs.shapes) == 1

    def test_graphs_without_memory_for_the_check_are_dropped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load("llama", tmp_path)
        storage, kernels = poisoned_storage(model), TritonKernels(is_exact=False)
        graphs = capture(model, storage, kernels, max_tokens=1, max_requests=1)

        def raise_out_of_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(graphs, "prepare_as", raise_out_of_memory)
        drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
        assert graphs.shapes == []
        assert "there is no memory to check it" in caplog.text

    @pytest.mark.parametrize("num_blocks", [24, 3], ids=["compared in the pool", "compared with a copy on the host"])
    def test_in_exact_mode_a_single_bit_in_the_pool_counts(self, num_blocks: int, tmp_path: Path) -> None:
        model = load("llama", tmp_path, is_exact=True)
        storage, kernels = poisoned_storage(model, num_blocks), TritonKernels(is_exact=True)
        correct_graphs = capture(model, storage, kernels, max_tokens=1, max_requests=1)
        drop_wrong_graphs(correct_graphs, model, storage, kernels, MAX_TOKENS)
        assert len(correct_graphs.shapes) == 1

        def capture_spoiled(compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
            def compute_and_spoil() -> StepOutputs:
                outputs = compute()
                storage.pool.blocks[1, 0] ^= 1
                return outputs

            return compute_and_spoil

        graphs = capture(model, storage, kernels, capture_spoiled, max_tokens=1, max_requests=1)
        drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
        assert graphs.shapes == []


def test_no_list_of_a_plan_may_be_longer_than_its_room() -> None:
    shape = StepShape(num_tokens=4, num_requests=2, num_partials=5, tile_rows=16, num_tiles=3)

    def plan(num_items: int, num_merges: int, num_partial_rows: int) -> AttentionPlan:
        work, merges, joined_rows = (torch.zeros(*size) for size in ((num_items, 8), (num_merges, 5), (0, 3)))
        return AttentionPlan(16, 2, None, work, merges, joined_rows, num_partial_rows)

    # The shape has room for 8 work items (5 partials and 3 tiles), 3 merges, and 5 partials of 16 rows.
    assert shape.has_room_for(plan(8, 3, 80))
    assert not shape.has_room_for(plan(9, 3, 80))
    assert not shape.has_room_for(plan(8, 4, 80))
    assert not shape.has_room_for(plan(8, 3, 81))


class LateDevice:
    """A device that starts to work when its result is awaited. Uploads, too, read the host's memory only then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: list[Callable[[], object]] = []
        read, compute, device = runner_module._read, Runner._compute, self

        def upload(arrays: StagedArrays, num_rows: int) -> None:
            region, _ = arrays._hosts[0]
            end = arrays._last_start + num_rows * arrays._last_row_bytes
            device._queue.append(lambda: arrays._device_region[:end].copy_(region[:end]))
            arrays._hosts.rotate()

        def read_late(*args: Any) -> StepResult:
            device.wait()
            return read(*args)

        def compute_at_once(*args: Any) -> StepOutputs:
            device.wait()
            return compute(*args)

        monkeypatch.setattr(StagedArrays, "upload", upload)
        monkeypatch.setattr(Runner, "is_asynchronous", True)
        monkeypatch.setattr(Runner, "_compute", compute_at_once)
        monkeypatch.setattr(runner_module, "_read", read_late)

    def capture(self, compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
        captured = Captured(compute)

        def replay() -> StepOutputs:
            self._queue.append(captured)
            return captured._outputs

        return replay

    def wait(self) -> None:
        while self._queue:
            self._queue.pop(0)()


def test_an_engine_generates_the_same_tokens_on_a_slow_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps are prepared, started ahead, and discarded because a request arrives or ends."""
    model = load("llama", tmp_path)
    kernels = TritonKernels(is_exact=False)

    def generate(is_late: bool) -> tuple[list[tuple[int, ...]], int]:
        """Return the generated tokens of each request, and the number of steps that were started ahead."""
        random, num_ahead = np.random.default_rng(1), 0
        with pytest.MonkeyPatch.context() as patch:
            storage = poisoned_storage(model)
            graphs = capture(model, storage, kernels, LateDevice(patch).capture, max_requests=2) if is_late else None
            core = EngineCore.build(
                Runner(model, storage, kernels, graphs),
                PrefixCache(24, BLOCK_SIZE),
                EngineConfig(max_step_tokens=16, max_running_requests=2),
                has_pending_calls=lambda: random.random() < 0.15,
            )
            futures = []
            for num_tokens, num_new in ((14, 12), (15, 7)):
                future: Future[GenerateResult] = Future()
                generation = Generation(Sampling(num_new, ignore_eos=True), frozenset(), lambda _: None)
                params = PrefillParams(random_tokens(0)[: num_tokens * 4])
                core.submit(Request(params, Namespace("late"), future, 0.0, generation))
                futures.append(future)
            while core.has_work:
                core.step()
                num_ahead += core._started_step is not None
            core.cache.check()
        return [future.result(0).token_ids for future in futures], num_ahead

    expected, _ = generate(is_late=False)
    got, num_ahead = generate(is_late=True)
    assert got == expected
    assert num_ahead >= 3
