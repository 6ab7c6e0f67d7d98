"""Fused modules on a GPU give the same answers, and modules that compute something else are not replaced."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)

from radixkv.compute.runner import Chunk, Runner
from radixkv.errors import UnsupportedModel
from radixkv.kernels import reference
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.layers import gpu_layers
from radixkv.model.layers.gpu_layers import FusedGpuLayers
from radixkv.model.model import Model
from radixkv.startup.model_check import check_model
from radixkv.storage.device_pool import KVStorage
from tests.kernels.gpu.interpreter import interpret_kernels
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE
from tests.model.layers.test_cpu_layers import replaced, scaled, swap_class, with_less_residual

# Only two layers, since each row takes a millisecond in Triton's interpreter.
SMALL = {**SHAPE, "num_hidden_layers": 2, "sliding_window": 8}
MODELS = {
    "llama": LlamaConfig(**SHAPE | {"num_hidden_layers": 2}),
    "qwen3": Qwen3Config(**SMALL, use_sliding_window=True, max_window_layers=1, head_dim=16),
    "gemma2": Gemma2Config(**SMALL, head_dim=16, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16, layer_types=["sliding_attention", "full_attention"]),
    "phi3": Phi3Config(**SMALL, pad_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
}

NORMS = {"input_layernorm", "post_attention_layernorm"}
OUTER_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}

# Parts of the first layer that are replaced, "" for the layer itself. Gemma gates with GELU, and normalizes the outputs
# of attention and MLP before it adds them; Phi3 has one matmul for gate and up, and dropout before the residual sum.
REPLACED_PARTS = {
    "llama": {"", "mlp"} | NORMS,
    "qwen3": {"", "mlp"} | NORMS | HEAD_NORMS,
    "gemma2": NORMS | OUTER_NORMS,
    "gemma3": NORMS | OUTER_NORMS | HEAD_NORMS,
    "phi3": NORMS,
    "mixtral": {""} | NORMS,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpret_kernels(monkeypatch)
    return torch.device("cpu")


def make(family: str, dtype: torch.dtype = torch.float32, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    """Make a random model, the same each time, with random weights in its norms, too."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MODELS[family], attn_implementation=attention, dtype=dtype).eval()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return module


def fused(module: PreTrainedModel, device: torch.device) -> Model:
    return Model("fused", module, device, is_exact=False, is_fused=True)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("family", list(MODELS))
def test_answers_match_transformers(family: str, device: torch.device) -> None:
    model = fused(make(family), device)
    prefix = "model.layers.0"
    found = {name for name in replaced(model.module) if name.startswith(prefix)}
    assert {name.removeprefix(prefix).removeprefix(".") for name in found} == REPLACED_PARTS[family]
    assert "model.norm" in replaced(model.module)
    runner = Runner(model, KVStorage(2, 16, model.kv_shape, device), TorchKernels())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20).astype("<u4")
    block_ids = np.arange(2, dtype=np.int32)
    got = [
        runner.run([Chunk(tokens.tobytes(), start, end, block_ids, None, wants_logits=True)]).logits[0]
        for start, end in ((0, 13), (13, 14), (14, 20))
    ]
    oracle = make(family, attention="eager").to(device)
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        expected = oracle(ids[None], use_cache=False).logits[0, [12, 13, 19]]
    assert (torch.stack(got) - expected).abs().max() <= 1e-4
    assert expected.std() > 0.01


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.bfloat16), ("gemma2", torch.float16)])
def test_half_precision_passes_the_checks(family: str, dtype: torch.dtype, device: torch.device) -> None:
    model = fused(make(family, dtype), device)
    assert replaced(model.module) == replaced(fused(make(family), device).module)
    check_model(model, TorchKernels(), 4)


def test_a_model_can_stay_as_it_was_written() -> None:
    model = Model("plain", make("llama"), torch.device("cpu"), is_exact=False, is_fused=False)
    assert replaced(model.module) == set()
    with model.unfused():
        assert replaced(model.module) == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_mode_fuses_the_same_parts_and_is_batch_invariant(dtype: torch.dtype, device: torch.device) -> None:
    model = Model("exact", make("llama", dtype), device, is_exact=True, is_fused=True)
    assert replaced(model.module) == replaced(fused(make("llama", dtype), device).module)
    runner = Runner(model, KVStorage(4, 16, model.kv_shape, device), TorchKernels())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 21).astype("<u4").tobytes()

    def chunk(start: int, end: int, block: int) -> Chunk:
        blocks = np.arange(block, block + 2, dtype=np.int32)
        return Chunk(tokens, start, end, blocks, None, wants_logits=True)

    at_once = runner.run([chunk(0, 21, 0)]).logits[0]
    runner.run([chunk(0, 20, 2)])
    assert torch.equal(runner.run([chunk(20, 21, 2)]).logits[0], at_once)
    assert torch.equal(runner.run([chunk(20, 21, 2), chunk(3, 20, 0)]).logits[0], at_once)


def test_exact_mode_refuses_a_kernel_whose_rows_depend_on_the_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swiglu = gpu_layers.swiglu

    def swiglu_by_row_count(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up) * (1 + gate.shape[1] * 1e-7)

    monkeypatch.setattr(gpu_layers, "swiglu", swiglu_by_row_count)
    assert "model.layers.0.mlp" in FusedGpuLayers(make("llama").to(device), is_exact=False).names
    with caplog.at_level(logging.INFO):
        assert "model.layers.0.mlp" not in FusedGpuLayers(make("llama").to(device), is_exact=True).names
    assert caplog.messages == ["LlamaMLP is not replaced: its results are not batch-invariant"]


class _LaunchCounter(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU; views launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe")))
        return func(*args, **(kwargs or {}))


class _CountedStep:
    """A step whose attention launches nothing; `launches_per_layer` adds its launches."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return torch.empty(call.query.shape, dtype=call.query.dtype)


def launches_per_layer(monkeypatch: pytest.MonkeyPatch, *, max_adapters: int = 0, **options: bool) -> int:
    """Return the launches of a layer: the difference between models of two layers and of one, plus attention's."""
    counter = _LaunchCounter()

    def one_launch(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*inputs: Any) -> Any:
            counter.count += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return kernel(*inputs)

        return launch

    for name in ("rms_norm", "add_rms_norm", "swiglu"):
        monkeypatch.setattr(gpu_layers, name, one_launch(getattr(reference, name)))
    counts = []
    for num_layers in (1, 2):
        config = LlamaConfig(**SHAPE | {"num_hidden_layers": num_layers})
        module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
        model = Model("counted", module, torch.device("cpu"), is_fused=True, max_adapters=max_adapters, **options)
        rows = torch.arange(32)
        counter.count = 0
        with counter:
            model.forward(rows, rows, _CountedStep(), rows[:1])
        counts.append(counter.count)
    attention_launches = 4  # write K/V, pack the queries, attend, and merge the splits
    return counts[1] - counts[0] + attention_launches


def test_a_layer_takes_22_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms, four matmuls, ten of the rotary embedding, four of attention, the gate, and the last residual sum."""
    assert launches_per_layer(monkeypatch, is_exact=False) == 22


def centered(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return super(type(self), self).forward(rows - rows.mean(-1, keepdim=True))


def with_another_eps(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(rows, self.weight.shape, self.weight, 1.5 * self.variance_epsilon)


def exchanging_gate_and_up(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.up_proj(rows)) * self.gate_proj(rows))


def with_a_pair(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
    return super(type(self), self).forward(rows), None


def without_the_mask(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return super(type(self), self).forward(hidden_states, **{**kwargs, "attention_mask": None})


def failing_in_a_trial(self: Any, rows: torch.Tensor) -> torch.Tensor:
    raise KeyError("what it wants")


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "forward", "reason"),
    [
        ("norm", scaled, "it computes something else"),
        ("norm", centered, "it computes something else"),
        ("norm", with_another_eps, "it computes something else"),
        ("norm", with_a_pair, "it computes something else"),
        ("layers.0.mlp", scaled, "it computes something else"),
        ("layers.0.mlp", exchanging_gate_and_up, "it computes something else"),
        ("layers.0.mlp", failing_in_a_trial, "KeyError: 'what it wants'"),
        ("layers.0", without_the_mask, "it computes something else"),
        ("layers.0", with_less_residual, "it computes something else"),
    ],
)
def test_a_part_with_different_results_is_left_alone(
    name: str,
    forward: Callable[..., Any],
    reason: str,
    dtype: torch.dtype,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = make("llama", dtype).to(device)
    del module.model.layers[1:]
    part = module.get_submodule(f"model.{name}")
    swap_class(part, forward)
    with caplog.at_level(logging.INFO):
        found = FusedGpuLayers(module, is_exact=False)
    known = {"norm", "layers.0", *(f"layers.0.{part}" for part in REPLACED_PARTS["llama"] - {""})}
    assert set(found.names) == replaced(module) == {f"model.{part}" for part in known - {name}}
    assert caplog.messages == [f"{type(part).__name__} is not replaced: {reason}"]


def test_the_log_names_each_class_once(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        FusedGpuLayers(make("gemma2").to(device), is_exact=False)
    assert caplog.messages == ["Gemma2MLP is not replaced: it computes something else"]


def test_a_kernel_that_fails_is_not_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(gpu_layers, "swiglu", failing)
    with caplog.at_level(logging.INFO):
        model = fused(make("llama"), device)
    assert not {name for name in replaced(model.module) if name.endswith("mlp")}
    assert caplog.messages[-1:] == ["LlamaMLP is not replaced: RuntimeError: no compiler"]
    check_model(model, TorchKernels(), 4)


def test_the_oracle_runs_as_transformers_wrote_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(make("llama"), device)
    names = replaced(model.module)
    with model.unfused():
        assert replaced(model.module) == set()
    assert replaced(model.module) == names
    monkeypatch.setattr(gpu_layers, "swiglu", lambda gate, up: gate * up)
    with pytest.raises(UnsupportedModel, match="over 0 cached tokens"):
        check_model(model, TorchKernels(), 4)


def test_hooks_are_called_in_replaced_parts(device: torch.device) -> None:
    model = fused(make("llama"), device)
    called: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    parts = {name: part for name, part in model.module.model.layers[1].named_modules() if name}
    runner = Runner(model, KVStorage(1, 16, model.kv_shape, device), TorchKernels())
    chunk = Chunk(np.arange(9, dtype="<u4").tobytes(), 0, 9, np.zeros(1, np.int32), None, wants_logits=True)
    expected = runner.run([chunk]).logits
    hooks = [part.register_forward_hook(hook(name)) for name, part in parts.items()]
    got = runner.run([chunk]).logits
    assert called == set(parts)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for each in hooks:
        each.remove()
    called.clear()
    assert torch.equal(runner.run([chunk]).logits, expected)
    assert not called


def test_a_layer_called_by_position_runs_as_it_was_written(device: torch.device) -> None:
    model = fused(make("llama"), device)
    layer = model.module.model.layers[0]
    layer.self_attn.forward = lambda hidden_states, attention_mask, **_: (hidden_states * attention_mask, None)
    rows, mask = torch.randn(1, 3, 64).to(device), torch.randn(1, 3, 64).to(device)
    got = layer(rows, mask)
    torch.testing.assert_close(got, layer(rows, attention_mask=mask))
    with model.unfused():
        torch.testing.assert_close(got, layer(rows, attention_mask=mask))


def test_norms_in_another_dtype_than_the_model_are_not_known(device: torch.device) -> None:
    """Their results have the weight's dtype, a kernel's that of the rows."""
    module = make("llama", torch.bfloat16).to(device)
    module.model.norm.float()
    assert "model.norm" not in FusedGpuLayers(module, is_exact=False).names


def test_a_forward_pass_that_was_replaced_before_is_kept(device: torch.device) -> None:
    module = make("llama").to(device)
    forward = module.model.norm.forward
    module.model.norm.forward = forward
    found = FusedGpuLayers(module, is_exact=False)
    assert "model.norm" not in found.names
    with found.originals():
        assert module.model.norm.forward is forward
    assert module.model.norm.forward is forward


def test_other_models_of_the_class_are_not_touched(device: torch.device) -> None:
    other = make("llama")
    fused(make("llama"), device)
    assert replaced(other) == set()
    assert replaced(make("llama")) == set()
