"""Layers in one call give the bits of separate calls, and unsupported layers are not replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.layer import NativeLayers
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import WatchedRows
from radixkv.model.attention.native_kernels import NativeKernels
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.last_layer import LastLayerRows
from radixkv.model.model import Model
from radixkv.model.on_cpu import native_library
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE
from tests.model.layers.test_cpu_layers import CPU, MODELS, make, replaced, scaled, swap_class
from tests.model.layers.test_fused_attention import strided_llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def native_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let C++ compute all matmuls, even if another library is faster on this machine."""
    if native_library() is None:
        pytest.skip("there are no kernels in C++ on this machine")
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.gemm_backends", lambda _: ("native",))


@pytest.fixture
def layer_row_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each layer that C++ computes as a whole, one or several layers per call."""
    row_counts: list[int] = []
    watch_native_layers(monkeypatch, lambda layers, rows: row_counts.extend([rows.shape[1]] * len(layers)))
    return row_counts


def watch_native_layers(monkeypatch: pytest.MonkeyPatch, on_call: Callable[[NativeLayers, torch.Tensor], None]) -> None:
    """Call `on_call` with the layers and the rows before each C++ call of whole layers."""
    native_call = NativeLayers.__call__

    def report_and_call(self: NativeLayers, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        on_call(self, rows)
        return native_call(self, rows, *args)

    monkeypatch.setattr(NativeLayers, "__call__", report_and_call)


def compute(
    model: Model, lengths: tuple[tuple[int, int], ...], *, sees_layers: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the suffixes of requests over random K/V.

    Args:
        model: the model.
        lengths: tokens of the prefix and of the suffix of each request.
        sees_layers: whether the step lets C++ compute whole layers.
        options: of `PagedStep`; `kernels` replaces the native ones.

    Returns:
        The logits of all tokens, the K/V of the pool, and whether each token's K/V are finite.
    """
    heads, dtype = model.kv_shape, model.kv_shape.dtype
    num_blocks = [-(-sum(each) // 16) for each in lengths]
    tables = np.split(np.arange(sum(num_blocks), dtype=np.int32), np.cumsum(num_blocks)[:-1])
    pool = KVPool.allocate(sum(num_blocks), NUM_LAYERS, heads.num_kv_heads, 16, heads.head_dim, dtype=dtype)
    pool.values.copy_(torch.randn(pool.values.shape, generator=torch.Generator().manual_seed(1)))
    batch = PagedBatch.build([each[1] for each in lengths], [sum(each) for each in lengths], tables, 16)
    library = native_library()
    assert library is not None
    kernels = options.pop("kernels", None) or NativeKernels(library)
    step = PagedStep(pool, batch, kernels, **options)
    if not sees_layers:
        step.view = lambda *_: None
    ids = torch.arange(int(batch.query_lens.sum())) * 7 % VOCAB_SIZE
    logits, _ = model.forward(ids, torch.from_numpy(batch.positions), step, torch.arange(len(ids)))
    return logits, pool.values, step.is_finite


LENGTHS = [((0, 70),), ((100, 1),), ((40, 3), (7, 1), (0, 33))]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_has_the_same_bits(
    family: str, is_exact: bool, dtype: torch.dtype, lengths: tuple[tuple[int, int], ...], layer_row_counts: list[int]
) -> None:
    model = Model(family, make(family, dtype), CPU, is_exact=is_exact)
    layer_row_counts.clear()
    got = compute(model, lengths)
    assert layer_row_counts == [sum(suffix for _, suffix in lengths)] * NUM_LAYERS
    expected = compute(model, lengths, sees_layers=False)
    assert len(layer_row_counts) == NUM_LAYERS
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert got[0].isfinite().all()


def test_all_layers_are_one_call_unless_hooks_are_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nums_layers: list[int] = []  # of each call
    model = Model("whole", make("llama"), CPU)
    watch_native_layers(monkeypatch, lambda layers, _: nums_layers.append(len(layers)))
    got = compute(model, ((20, 4), (0, 1)))
    assert nums_layers == [NUM_LAYERS]
    model.module.model.layers[1].register_forward_hook(lambda *_: None)
    expected = compute(model, ((20, 4), (0, 1)))
    assert nums_layers == [NUM_LAYERS, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_the_layers_before_a_shortened_last_one_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, int]] = []  # the number of layers and of rows of each call
    monkeypatch.setitem(MODELS, "llama", LlamaConfig(**SHAPE | {"num_hidden_layers": 3}))
    model = Model("three layers", make("llama"), CPU)
    watch_native_layers(monkeypatch, lambda layers, rows: called.append((len(layers), rows.shape[1])))
    outputs = []
    for sees_layers in (True, False):
        pool = KVPool.allocate(2, 3, model.kv_shape.num_kv_heads, 16, model.kv_shape.head_dim, dtype=torch.float32)
        tables, kernels = [np.arange(2, dtype=np.int32)], NativeKernels(native_library())
        step = PagedStep(pool, PagedBatch.build([20], [20], tables, 16), kernels)
        last = PagedStep(pool, PagedBatch.build([1], [20], tables, 16), kernels, is_reading=True)
        if not sees_layers:
            step.view = lambda *_: None
        rows = torch.tensor([19])
        last_rows = LastLayerRows(rows, step.write, last.read)
        ids = torch.arange(20)
        outputs.append((model.forward(ids, ids, step, rows, last_rows=last_rows)[0], pool.values))
    assert called == [(2, 20)]
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def forward_with_doubled_embeddings(
    self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
) -> Any:
    rows = 2 * self.embed_tokens(input_ids)
    kwargs = {"position_embeddings": self.rotary_emb(rows, position_ids), "attention_mask": None, **kwargs}
    for layer in self.layers:
        rows = layer(rows, **kwargs)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(rows))


def test_a_decoder_that_does_more_computes_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    nums_layers: list[int] = []  # of each call
    module = make("llama")
    swap_class(module.model, forward_with_doubled_embeddings)
    model = Model("doubled", module, CPU)
    watch_native_layers(monkeypatch, lambda layers, _: nums_layers.append(len(layers)))
    compute(model, ((20, 4),))
    assert nums_layers == [1, 1]


def test_a_step_with_padded_rows_runs_its_own_attention(layer_row_counts: list[int]) -> None:
    module = make("llama")
    swap_class(module.model.norm, scaled)  # this norm is computed by torch, so a single row is padded
    model = Model("padded", module, CPU)
    layer_row_counts.clear()
    got = compute(model, ((100, 1),))
    assert layer_row_counts == []
    assert torch.equal(got[0], compute(model, ((100, 1),), sees_layers=False)[0])
    compute(model, ((0, 70),))
    assert layer_row_counts == [70, 70]


def test_strided_rows_are_left_to_the_parts(layer_row_counts: list[int]) -> None:
    model = Model("odd rows", make("llama"), CPU)
    expected = compute(model, ((20, 4),))
    embedding = model.module.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, rows: rows.transpose(1, 2).contiguous().transpose(1, 2))
    layer_row_counts.clear()
    assert torch.equal(compute(model, ((20, 4),))[0], expected[0])
    assert layer_row_counts == []


def test_a_token_with_non_finite_keys_is_reported(layer_row_counts: list[int]) -> None:
    model = Model("infinite", make("llama"), CPU)
    model.module.get_input_embeddings().weight.data[7 * 4] = float("inf")
    layer_row_counts.clear()
    *_, is_finite = compute(model, ((0, 2), (0, 5)))
    assert layer_row_counts == [7, 7]
    assert is_finite[:2].all(), "those of the other request"
    assert not is_finite[4]


class RecordingWatcher:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        self.layers.append(layer)


def test_a_watched_step_runs_its_own_attention(layer_row_counts: list[int]) -> None:
    watcher, model = RecordingWatcher(), Model("watched", make("llama"), CPU)
    layer_row_counts.clear()
    got = compute(model, ((20, 4),), watched=[WatchedRows(0, 4, watcher)])
    assert (watcher.layers, layer_row_counts) == ([0, 1], [])
    assert torch.equal(got[0], compute(model, ((20, 4),))[0])


@pytest.mark.parametrize("options", [{"is_reading": True}, {"kernels": TorchKernels()}], ids=["reading", "torch"])
def test_a_step_that_does_not_write_or_is_not_in_cpp_runs_its_own_attention(
    options: dict[str, Any], layer_row_counts: list[int]
) -> None:
    model = Model("asked", make("llama"), CPU)
    layer_row_counts.clear()
    compute(model, ((20, 4),), **options)
    assert layer_row_counts == []


def test_hooks_are_called_in_a_step_over_a_pool(layer_row_counts: list[int]) -> None:
    model, hook_calls = Model("hooked", make("llama"), CPU), []
    model.module.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: hook_calls.append(1))
    layer_row_counts.clear()
    compute(model, ((20, 4),))
    assert hook_calls == [1]
    assert layer_row_counts == [4], "the other layer runs in one call"


def use_relu(module: nn.Module) -> None:
    module.model.layers[0].mlp.act_fn = nn.ReLU()


def hook_norm(module: nn.Module) -> None:
    norm = module.model.layers[0].input_layernorm
    norm.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [use_relu, hook_norm])
def test_a_layer_with_a_part_that_is_not_in_cpp_is_left_alone(
    change: Callable[[nn.Module], None], layer_row_counts: list[int]
) -> None:
    module = make("llama")
    change(module)
    model = Model("mixed", module, CPU)
    layer_row_counts.clear()
    assert compute(model, ((20, 4),))[0].isfinite().all()
    assert layer_row_counts == [4]


def test_strided_cosines_are_left_to_the_module(layer_row_counts: list[int]) -> None:
    expected = compute(Model("plain", make("llama"), CPU), ((20, 4),))
    layer_row_counts.clear()
    got = compute(Model("strided", strided_llama(), CPU), ((20, 4),))
    assert layer_row_counts == []
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_norms_of_all_heads_at_once_are_left_to_the_parts(layer_row_counts: list[int]) -> None:
    module = make("llama")
    module.model.layers[0].self_attn = Olmo2Attention(module.config, 0).eval()
    model = Model("wide norms", module, CPU)
    assert "model.layers.0.self_attn" in replaced(model.module)
    layer_row_counts.clear()
    got = compute(model, ((20, 4),))
    assert layer_row_counts == [4], "the other layer runs in one call"
    expected = compute(model, ((20, 4),), sees_layers=False)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_adapters_may_change_all_linear_layers(layer_row_counts: list[int]) -> None:
    model = Model("adapted", make("llama"), CPU, max_adapters=1)
    layer_row_counts.clear()
    compute(model, ((20, 4),))
    assert layer_row_counts == []
