"""Fused modules on a CPU give the same answers, and modules that compute something else are not replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from radixkv.kernels.native.gemm import multiplies
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.layers import cpu_layers
from radixkv.model.model import Model
from radixkv.model.on_cpu import native_library
from radixkv.startup.model_check import check_model
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE

CPU = torch.device("cpu")
SMALL = {**SHAPE, "num_hidden_layers": 2, "sliding_window": 8}
MODELS = {
    "llama": LlamaConfig(**SHAPE | {"num_hidden_layers": 2}),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, use_sliding_window=True, max_window_layers=1, head_dim=16),
    "gemma2": Gemma2Config(**SMALL, head_dim=16, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**SMALL, pad_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
}
NORMS = {"input_layernorm", "post_attention_layernorm"}
# Parts of the first layer that are replaced, "" for the layer itself.
REPLACED_PARTS = {
    "llama": {"", "self_attn", "mlp"} | NORMS,
    "qwen2": {"", "self_attn", "mlp"} | NORMS,
    "qwen3": {"", "self_attn", "mlp", "self_attn.q_norm", "self_attn.k_norm"} | NORMS,
    "gemma2": {"self_attn", "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"} | NORMS,
    "phi3": NORMS,
    "mixtral": {"self_attn"} | NORMS,
}


class RecordingStep:
    """A step that records its calls. The attention output is the query, with each head reversed."""

    def __init__(self) -> None:
        self.layers_and_scorings: list[tuple[int, Scoring]] = []
        self.tensors: list[torch.Tensor] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.layers_and_scorings.append((call.layer, call.scoring))
        self.tensors += [call.query, call.key, call.value]
        return call.query.flip(-1)


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a random model, the same each time, with random weights in its norms, too."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MODELS[family], attn_implementation=ATTENTION_NAME, dtype=dtype).eval()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return module


def replaced(module: nn.Module) -> set[str]:
    """Return the names of the parts of a model that are replaced by fused ones."""
    return {name for name, part in module.named_modules() if "forward" in vars(part)}


def answer(model: Model, num_tokens: int) -> tuple[torch.Tensor, RecordingStep]:
    step = RecordingStep()
    ids = (torch.arange(num_tokens) * 7 + 3) % VOCAB_SIZE
    logits, _ = model.forward(ids, torch.arange(num_tokens) + 3, step, torch.arange(num_tokens))
    return logits, step


@pytest.fixture(params=["C++", "torch"])
def between_matmuls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms, rotations and gates be computed in C++, or by torch."""
    if request.param == "torch":
        monkeypatch.setattr("radixkv.model.model.native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("there are no kernels in C++ on this machine")


@pytest.mark.parametrize("backend", ["native", "plain"])
@pytest.mark.parametrize("family", list(MODELS))
@pytest.mark.usefixtures("between_matmuls")
def test_a_single_row_is_padded_unless_all_its_operations_are_batch_invariant(
    family: str, backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "native" and not multiplies(torch.empty(1, 1)):
        pytest.skip("there are no matmuls in C++ on this machine")
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.gemm_backends", lambda _: (backend,))
    model = Model(family, make(family), CPU, is_exact=True)
    num_rows: list[int] = []
    embedding = model.module.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: num_rows.append(output.shape[1]))
    (alone, _), (among_others, _) = answer(model, 1), answer(model, 19)
    assert torch.equal(alone[0], among_others[0])
    is_batch_invariant = backend == "native" and family in ("llama", "qwen2", "qwen3") and "[C++-" in request.node.name
    assert num_rows == ([1, 19] if is_batch_invariant else [2, 24]), "19 rows are padded to 24"


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("family", list(MODELS))
@pytest.mark.usefixtures("between_matmuls")
def test_answers_match_the_original_model(family: str, *, is_exact: bool) -> None:
    model = Model(family, make(family), CPU, is_exact=is_exact)
    prefix = "model.layers.0"
    replaced_in_layer = {name for name in replaced(model.module) if name.startswith(prefix)}
    assert {name.removeprefix(prefix).removeprefix(".") for name in replaced_in_layer} == REPLACED_PARTS[family]
    assert "model.norm" in replaced(model.module)
    original = Model(family, make(family), CPU, is_exact=False, is_fused=False)
    assert replaced(original.module) == set()
    for num_tokens in (1, 2, 19, 70):
        got, step = answer(model, num_tokens)
        expected, expected_step = answer(original, num_tokens)
        assert step.layers_and_scorings == expected_step.layers_and_scorings
        assert (got - expected).abs().max() <= 1e-4
        assert expected.std() > 0.01
        for tensor, expected_tensor in zip(step.tensors, expected_step.tensors, strict=True):
            assert tensor.shape == expected_tensor.shape
            assert (tensor - expected_tensor).abs().max() <= 1e-4


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.usefixtures("between_matmuls")
def test_half_precision_passes_the_checks(family: str, dtype: torch.dtype) -> None:
    model = Model(family, make(family, dtype), CPU)
    assert replaced(model.module) == replaced(Model(family, make(family), CPU).module)
    check_model(model, TorchKernels(), 16)


def swap_class(part: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a part a class derived from its own, whose `forward` computes something else."""
    own_class = type(part)
    part.__class__ = type(f"Odd{own_class.__name__}", (own_class,), {"forward": forward})


def scaled(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return 1.01 * super(type(self), self).forward(rows)


def scaled_attention(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    self.scaling = self.head_dim**-0.5 * (1.0 if kwargs["radix_step"].__class__ is RecordingStep else 0.5)
    output, weights = super(type(self), self).forward(*args, **kwargs)
    return 1.01 * output, weights


def with_less_residual(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return super(type(self), self).forward(hidden_states, **kwargs) - 0.01 * hidden_states


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("layers.0.input_layernorm", scaled),
        ("layers.0.mlp", scaled),
        ("layers.0.self_attn", scaled_attention),
        ("layers.0", with_less_residual),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_with_different_results_are_left_alone(
    name: str, forward: Callable[..., Any], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    module = make("llama", dtype)
    part = module.get_submodule(f"model.{name}")
    swap_class(part, forward)
    with caplog.at_level(logging.INFO, logger="radixkv.model.layers.replaced_parts"):
        model = Model("odd", module, CPU)
    assert f"model.{name}" not in replaced(model.module)
    assert "model.layers.0" not in replaced(model.module)
    assert "model.layers.1" in replaced(model.module)
    assert caplog.messages[0] == f"{type(part).__name__} is not replaced: it computes something else"


def test_an_activation_that_is_not_known_to_be_elementwise_is_left_alone() -> None:
    class Soft(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.softmax(-1)

    module = make("llama")
    module.model.layers[0].mlp.act_fn = Soft()
    assert "model.layers.0.mlp" not in replaced(Model("odd", module, CPU).module)


def test_hooks_are_called_in_replaced_parts() -> None:
    model = Model("hooked", make("llama"), CPU)
    expected, _ = answer(model, 9)
    called: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    parts = {name: part for name, part in model.module.model.layers[1].named_modules() if name}
    hooks = [part.register_forward_hook(hook(name)) for name, part in parts.items()]
    got, _ = answer(model, 9)
    assert called == set(parts)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for each in hooks:
        each.remove()
    called.clear()
    assert torch.equal(answer(model, 9)[0], expected)
    assert not called


def test_the_oracle_runs_as_transformers_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("undone", make("llama"), CPU)
    names = replaced(model.module)
    with model.unfused():
        assert replaced(model.module) == set()
        unfused, _ = answer(model, 9)
    assert replaced(model.module) == names
    torch.testing.assert_close(answer(model, 9)[0], unfused, rtol=1e-5, atol=1e-5)
    assert not torch.equal(answer(model, 9)[0], unfused), "fused and original parts differ in the last bits"
    assert cpu_layers.FusedCpuLayers(make("llama"), is_exact=True).names == tuple(
        name for name, _ in make("llama").named_modules() if name.endswith("norm")
    ), "only norms are replaced if linear layers are not packed"
