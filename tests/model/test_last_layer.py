"""The last layer computes only the rows whose logits are needed, with the same bits, if the model's layers allow it."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from radixkv.compute import forward
from radixkv.compute.forward import Chunk, lay_out
from radixkv.compute.runner import Runner
from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.last_layer import LastLayerRows
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import CONFIGS, VOCAB_SIZE
from tests.model.layers.test_cpu_layers import MODELS, RecordingStep

CPU = torch.device("cpu")
BLOCK_SIZE = 16
ALL_CONFIGS = {**CONFIGS, "mixtral": MODELS["mixtral"]}
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 100).astype("<u4").tobytes()


def make(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    copied_config = copy.deepcopy(config)  # creating a model changes its configuration
    return AutoModelForCausalLM.from_config(copied_config, attn_implementation=ATTENTION_NAME, dtype=dtype)


def chunks(*, wants_logits: bool = True) -> list[Chunk]:
    """Make chunks of three requests: with logits of the last token, without logits, and with logits of all tokens."""
    tables = np.arange(21, dtype=np.int32).reshape(3, 7)
    return [
        Chunk(TOKENS, 0, 33, tables[0], None, wants_logits),
        Chunk(TOKENS, 0, 50, tables[1], None, wants_logits=False),
        Chunk(TOKENS, 0, 5, tables[2], None, wants_logits, wants_all_logits=wants_logits),
    ]


def compute(model: Model, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Return the logits, the bytes of the pool, and which chunks are finite."""
    storage = KVStorage(21, BLOCK_SIZE, model.kv_shape, CPU)
    storage.pool.blocks.zero_()
    result = Runner(model, storage, TorchKernels()).run(chunks)
    return result.logits.clone(), storage.pool.blocks, result.is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(ALL_CONFIGS))
def test_logits_and_all_keys_are_bitwise_identical_to_those_of_a_full_last_layer(
    family: str, dtype: torch.dtype
) -> None:
    model = Model(family, make(ALL_CONFIGS[family], dtype), CPU)
    assert model.can_shorten_last_layer
    shortened = [compute(model, each) for each in (chunks(), chunks(wants_logits=False))]
    model.can_shorten_last_layer = False
    full = [compute(model, each) for each in (chunks(), chunks(wants_logits=False))]
    for (logits, blocks, is_finite), (expected, expected_blocks, _) in zip(shortened, full, strict=True):
        assert torch.equal(logits, expected)
        assert torch.equal(blocks, expected_blocks)
        assert is_finite == [True] * 3
    assert [len(each[0]) for each in shortened] == [6, 0]  # 1 + 0 + 5 rows of logits, and none


def test_fast_mode_agrees() -> None:
    model = Model("fast", make(ALL_CONFIGS["llama"]), CPU, is_exact=False)
    assert model.can_shorten_last_layer
    got, *_ = compute(model, chunks())
    model.can_shorten_last_layer = False
    expected, *_ = compute(model, chunks())
    assert (got - expected).abs().max() <= 1e-4
    assert expected.std() > 0.01


def test_only_rows_with_logits_reach_the_final_norm() -> None:
    model = Model("llama", make(ALL_CONFIGS["llama"]), CPU, is_exact=False)
    row_counts = []
    model.module.model.norm.register_forward_pre_hook(lambda _, args: row_counts.append(args[0].shape[1]))
    compute(model, chunks())
    compute(model, chunks(wants_logits=False))
    assert row_counts == [6, 1]


@pytest.mark.parametrize("bad", [5, 34])
def test_non_finite_rows_without_logits_are_detected_by_their_keys(bad: int) -> None:
    """Only the second request fails, whose logits are not wanted."""
    model = Model("llama", make(ALL_CONFIGS["llama"]), CPU)
    tokens = np.frombuffer(TOKENS, "<u4").copy()
    tokens[bad] = VOCAB_SIZE - 1
    model.module.model.embed_tokens.weight.data[VOCAB_SIZE - 1] = float("nan")
    first, second, third = chunks()
    second = dataclasses.replace(second, tokens=tokens.tobytes())
    _, _, is_finite = compute(model, [first, second, third])
    assert is_finite == [True, False, True]


def test_an_answer_that_is_not_finite_fails_its_request() -> None:
    """Keys are finite in all layers: infinite values arise only in the MLP of the last layer."""
    model = Model("llama", make(ALL_CONFIGS["llama"]), CPU, is_exact=False, is_fused=False)
    down = model.module.model.layers[-1].mlp.down_proj
    down.register_forward_hook(lambda _, __, rows: rows.index_fill(1, torch.tensor([0]), float("inf")))
    _, _, is_finite = compute(model, chunks())
    assert is_finite == [False, True, True]


class RowMixingLayer(LlamaDecoderLayer):
    """A layer whose rows depend on each other."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(1, keepdim=True), **kwargs)


class WithoutAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_layer_that_mixes_rows_computes_all_of_them(*, is_exact: bool) -> None:
    module = make(ALL_CONFIGS["llama"])
    module.model.layers[-1].__class__ = RowMixingLayer
    assert not Model("mixing", module, CPU, is_exact=is_exact).can_shorten_last_layer


def test_layers_outside_a_module_list_compute_all_rows() -> None:
    module = make(ALL_CONFIGS["llama"])
    layers = module.model.layers
    module.model.layers = nn.Sequential(*layers)
    model = Model("sequential", module, CPU)
    assert not model.can_shorten_last_layer
    assert lay_out(chunks(), BLOCK_SIZE, can_shorten_last_layer=model.can_shorten_last_layer).last_layer is None


def test_batches_of_few_rows_are_computed_in_full() -> None:
    table = np.arange(7, dtype=np.int32)
    num_computed_in_full = forward._MIN_SKIPPED_ROWS  # with this number of rows, one fewer would be skipped
    for num_tokens, is_short in ((1, False), (num_computed_in_full, False), (num_computed_in_full + 1, True)):
        chunk = Chunk(TOKENS, 20, 20 + num_tokens, table, None, wants_logits=True)
        layout = lay_out([chunk], BLOCK_SIZE, can_shorten_last_layer=True)
        assert (layout.last_layer is not None) == is_short
    assert layout.last_layer is not None
    assert (layout.last_layer.query_starts, layout.last_layer.kv_lens) == ((0, 1), (21 + num_computed_in_full,))
    assert layout.last_layer.positions.tolist() == [20 + num_computed_in_full]


def test_watched_rows_and_rows_of_adapters_are_computed_in_full() -> None:
    class Watcher:
        def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
            raise AssertionError

    table = np.arange(7, dtype=np.int32)
    chunk = Chunk(TOKENS, 0, 100, table, None, wants_logits=True)
    for other in ({"adapter": "a" * 32}, {"watcher": Watcher()}, {"part_ids": table}):
        layout = lay_out([dataclasses.replace(chunk, **other)], BLOCK_SIZE, can_shorten_last_layer=True)
        assert layout.last_layer is None


def test_a_layer_that_does_not_attend_is_refused() -> None:
    module = make(ALL_CONFIGS["llama"])
    model = Model("llama", module, CPU)
    layer = module.model.layers[-1]
    vars(layer)["forward"] = WithoutAttention().forward
    rows, step = torch.tensor([19]), RecordingStep()
    with pytest.raises(UnsupportedModel, match="expected the last layer to attend"):
        model.forward(
            torch.arange(20),
            torch.arange(20),
            step,
            rows,
            last_rows=LastLayerRows(rows, lambda *_: None, lambda *_: rows),
        )
