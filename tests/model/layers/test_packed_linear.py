from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, gemm_backends
from radixkv.kernels.cpu.gemm_trial import GemmChoice
from radixkv.model.layers.gemm_tuner import GemmTuner
from radixkv.model.layers.packed_linear import MERGED, Matmul, PackedLinear, PackedSlice, pack_linears

SIZES = {"vocab_size": 50, "initializer_range": 0.2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=True, attention_bias=True,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4)),
}  # fmt: skip


def built(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    module: PreTrainedModel = MODELS[name]()
    return module.eval().requires_grad_(False)


class FixedBackendTuner(GemmTuner):
    """Chooses a given backend for every weight; None finds no backend that is batch-invariant."""

    def __init__(self, backend: str | None, *, is_exact: bool) -> None:
        super().__init__(is_exact=is_exact)
        self.backend, self.costs = backend, ((2, 1e-6), (16, 4e-6)) if is_exact else ()

    def choose(self, *_: object, **__: object) -> GemmChoice | None:
        return None if self.backend is None else GemmChoice(self.backend, self.costs)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("backend", gemm_backends(torch.empty(1, 1)))
@pytest.mark.parametrize("name", list(MODELS))
def test_a_packed_model_gives_the_same_answers(name: str, backend: str, *, is_exact: bool) -> None:
    module = built(name)
    ids = torch.arange(37)[None]
    with torch.inference_mode():
        expected = module(ids).logits
        pack_linears(module, FixedBackendTuner(backend, is_exact=is_exact))
        got = module(ids).logits
    assert sum(isinstance(part, (PackedLinear, PackedSlice)) for part in module.modules()) >= 9
    assert not any(type(part) is nn.Linear for part in module.modules())
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", ["plain", "blocked"])
def test_a_packed_weight_is_not_stored_twice(backend: str) -> None:
    module = built("llama")
    weights = {name: weakref.ref(weight) for name, weight in module.named_parameters() if "proj.weight" in name}
    pack_linears(module, FixedBackendTuner(backend, is_exact=False))
    gc.collect()
    assert len(weights) == 14
    assert [name for name, weight in weights.items() if weight() is not None] == []
    assert "model.embed_tokens.weight" in dict(module.named_parameters()), "tied with the head, and still looked up"


def test_layers_without_a_batch_invariant_backend_are_not_packed() -> None:
    module = built("llama")
    before = copy.deepcopy(module)
    pack_linears(module, FixedBackendTuner(None, is_exact=True))
    assert [type(part) for part in module.modules()] == [type(part) for part in before.modules()]


def test_hooks_and_layers_of_other_libraries_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    module = built("llama")
    module.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    module.model.layers[0].mlp.gate_proj = Other(32, 48, bias=False)
    pack_linears(module, FixedBackendTuner("blocked", is_exact=False))
    assert type(module.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(module.model.layers[0].mlp.gate_proj) is Other
    assert type(module.model.layers[0].mlp.down_proj) is PackedLinear


@pytest.mark.parametrize("shape", [(0, 16), (1, 0, 16), (2, 3, 16), (16,)])
def test_leading_dimensions_are_preserved(shape: tuple[int, ...]) -> None:
    weight = torch.randn(8, 16)
    rows = torch.randn(shape)
    for costs in ((), ((2, 1e-6),)):
        matmul = Matmul([weight], None, GemmChoice("plain", costs))
        torch.testing.assert_close(matmul(rows), rows @ weight.t())


def test_an_unaligned_weight_is_copied_to_an_aligned_address() -> None:
    weight = torch.randn(8 * 16 + 3)[3:].view(8, 16)
    assert GEMM_BACKENDS["plain"].pack(weight).data_ptr() % 64 == 0
    torch.testing.assert_close(GEMM_BACKENDS["plain"].pack(weight), weight)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_the_same_input_are_merged(monkeypatch: pytest.MonkeyPatch, *, bias: bool) -> None:
    module = built("llama")
    mlp = module.model.layers[0].mlp
    if bias:
        mlp.gate_proj.bias, mlp.up_proj.bias = (nn.Parameter(torch.randn(48), requires_grad=False) for _ in range(2))
    rows = torch.randn(1, 5, 32)
    expected = [mlp.gate_proj(rows), mlp.up_proj(rows)]
    pack_linears(module, FixedBackendTuner("blocked", is_exact=False))
    out_features: list[int] = []  # of each matmul
    matmul_call = Matmul.__call__

    def record_and_call(self: Matmul, rows: torch.Tensor) -> torch.Tensor:
        out_features.append(self.out_features)
        return matmul_call(self, rows)

    monkeypatch.setattr(Matmul, "__call__", record_and_call)
    torch.testing.assert_close([mlp.gate_proj(rows), mlp.up_proj(rows)], expected)
    assert out_features == [96], "one matmul computes both layers of 48 features"
    torch.testing.assert_close(mlp.up_proj(rows), expected[1])
    torch.testing.assert_close(mlp.gate_proj(rows + 0), expected[0])
    torch.testing.assert_close(mlp.gate_proj(2 * rows) - expected[0], mlp.gate_proj(rows) - mlp.gate_proj(0 * rows))
    assert MERGED[1] == ("gate_proj", "up_proj")


def test_layers_with_and_without_bias_are_not_merged() -> None:
    module = built("llama")
    module.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(48), requires_grad=False)
    pack_linears(module, FixedBackendTuner("blocked", is_exact=False))
    assert type(module.model.layers[0].mlp.up_proj) is PackedLinear
    assert type(module.model.layers[1].mlp.up_proj) is PackedSlice


def test_a_shape_gets_the_share_of_the_weights_that_have_it() -> None:
    shares: dict[tuple[object, ...], float] = {}  # by shape, and whether there is no bias

    class RecordingTuner(FixedBackendTuner):
        def choose(
            self, weight: torch.Tensor, bias: torch.Tensor | None, *_: object, share: float, **__: object
        ) -> GemmChoice | None:
            shares[(*weight.shape, bias is None)] = share
            return super().choose()

    module = built("llama")
    sizes = {name: part.weight.numel() for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    total = sum(sizes.values())
    head = module.get_output_embeddings().weight
    pack_linears(module, RecordingTuner("plain", is_exact=False))
    assert shares[(*head.shape, True)] == head.numel() / total
    merged = sum(size for name, size in sizes.items() if name.endswith(("q_proj", "k_proj", "v_proj")))
    assert merged / total in shares.values()
    assert sum(shares.values()) == pytest.approx(1.0)
