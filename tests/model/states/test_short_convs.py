from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2ForCausalLM, PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.model.architecture import check_architecture
from radixkv.model.attention.attention_function import kv_layer_of
from radixkv.model.attention.paged_step import RunningPass
from radixkv.model.states.short_convs import ShortConvs
from radixkv.model.states.state_step import StateRows, StateStep
from radixkv.storage.state_pool import StatePool
from tests.model.coverage.coverage import cover
from tests.model.coverage.small_configs import small_config


def module_of(name: str = "lfm2") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(name)).eval().requires_grad_(False)


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_answers_are_those_of_eager_attention_whatever_is_kept(model_type: str, tmp_path: Path) -> None:
    """`cover` computes prompts cold, from kept states, in chunks and in a batch, in exact mode with the same bits."""
    assert cover(model_type, tmp_path).refusal is None


def test_short_convolutions_are_refused_on_a_gpu() -> None:
    config = small_config("lfm2")
    with pytest.raises(
        UnsupportedModel, match=r"Lfm2ForCausalLM: short convolutions .*: expected model\.device to be cpu"
    ):
        check_architecture(Lfm2ForCausalLM, config, torch.device("cuda"))


def test_layers_with_attention_and_with_convolutions_are_numbered_separately() -> None:
    module = module_of()
    convs = ShortConvs(module)
    assert convs.shape is not None
    assert (convs.shape.num_layers, convs.shape.num_inputs, convs.shape.num_channels) == (2, 2, 64)
    assert [layer.conv.state_layer for layer in module.model.layers if hasattr(layer, "conv")] == [0, 1]
    assert [kv_layer_of(layer.self_attn) for layer in module.model.layers if hasattr(layer, "self_attn")] == [0]


def test_a_model_without_short_convolutions_stays_as_it_is() -> None:
    module = module_of("llama")
    convs = ShortConvs(module)
    assert convs.shape is None
    assert not any("forward" in vars(part) or hasattr(part, "kv_layer") for part in module.modules())


def test_original_layers_compute_as_transformers_wrote_it() -> None:
    module, rows = module_of(), torch.randn(1, 9, 64)
    part: Any = module.model.layers[0].conv
    expected = part(rows)
    convs = ShortConvs(module)
    part.running_pass = RunningPass()
    with pytest.raises(
        UnsupportedModel, match=r"^Lfm2ShortConv: expected to convolve in a forward pass over the cache"
    ):
        part(rows)
    with convs.originals():
        assert torch.equal(part(rows), expected)
    assert convs.shape is not None
    pool = StatePool(0, convs.shape, torch.device("cpu"))
    with part.running_pass.with_step(StateStep(pool, StateRows.build([0, 9], [0], [], 2))):
        torch.testing.assert_close(part(rows), expected)


@pytest.mark.parametrize("change", ["activation", "dilation", "in_proj", "bias"])
def test_a_layer_that_computes_something_else_is_refused_by_name(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of()
    part: Any = module.model.layers[2].conv
    reason = "expected a causal depthwise convolution"
    if change == "activation":
        forward = type(part).forward
        monkeypatch.setattr(type(part), "forward", lambda *args: forward(*args).tanh())
        reason = "expected a short convolution between two projections"
    elif change == "dilation":
        part.conv.dilation = (2,)
    elif change == "in_proj":
        part.in_proj = nn.Linear(64, 4 * 64)
    else:
        forward = type(part).forward
        monkeypatch.setattr(type(part), "forward", lambda *args: forward(*args) + 0.1)
        reason = "expected a short convolution between two projections"
    with pytest.raises(UnsupportedModel, match=f"^Lfm2ShortConv: {reason}"):
        ShortConvs(module)


def test_convolutions_of_different_sizes_are_rejected() -> None:
    module = module_of()
    part: Any = module.model.layers[2].conv
    part.conv = nn.Conv1d(64, 64, 4, groups=64, padding=3)
    part.conv_kernel_size = 4
    with pytest.raises(UnsupportedModel, match=r"expected short convolutions of one size, got \["):
        ShortConvs(module)
