from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.attention_function import _attention_forward
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.latent import LatentHeads, LatentParts, absorbed_layers
from radixkv.model.layers.gemm_tuner import GemmTuner
from tests.model.exact.exact_cases import MODELS

RANK, ROPE_DIM, NUM_HEADS = 40, 8, 4


def module_of(name: str = "deepseek_v3", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name]).to(dtype).eval().requires_grad_(False)


def attention_of(module: PreTrainedModel, layer: int = 1) -> Any:
    return module.get_submodule(f"model.layers.{layer}.self_attn")


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_scores_and_values_match_those_of_expanded_keys_and_values(name: str, is_exact: bool) -> None:
    module = module_of(name)
    part = attention_of(module)
    latent, rotated = torch.randn(1, 1, 9, RANK), torch.randn(1, 1, 9, ROPE_DIM)
    key, value = part.expand_kv(latent, rotated)
    LatentParts(module, is_exact=is_exact)
    stored, nothing = part.expand_kv(latent, rotated)
    assert nothing is None
    assert torch.equal(stored, torch.cat((latent, rotated), -1))
    rows, heads = torch.randn(9, NUM_HEADS, key.shape[-1]), part.latent_heads
    expected_scores = torch.einsum("qhd,hkd->hqk", rows, key[0])
    scores = torch.einsum("qhd,kd->hqk", heads.queries(rows), stored[0, 0])
    torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-5)
    stored_per_head = stored[0].transpose(0, 1).expand(-1, NUM_HEADS, -1)
    torch.testing.assert_close(heads.values(stored_per_head), value[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_mode_is_batch_invariant(dtype: torch.dtype) -> None:
    module = module_of(dtype=dtype)
    LatentParts(module, is_exact=True)
    heads = attention_of(module).latent_heads
    rows = torch.randn(65, NUM_HEADS, 16 + ROPE_DIM).to(dtype)
    attended = torch.randn(65, NUM_HEADS, RANK + ROPE_DIM).to(dtype)
    queries, values = heads.queries(rows), heads.values(attended)
    for start, end in ((0, 1), (3, 5), (7, 40), (64, 65)):
        assert torch.equal(heads.queries(rows[start:end]), queries[start:end])
        assert torch.equal(heads.values(attended[start:end]), values[start:end])


def test_original_layers_expand_keys_and_values() -> None:
    module = module_of()
    parts = LatentParts(module, is_exact=False)
    latent, rotated = torch.randn(1, 1, 9, RANK), torch.randn(1, 1, 9, ROPE_DIM)
    with parts.originals():
        key, value = attention_of(module).expand_kv(latent, rotated)
        assert key.shape == (1, NUM_HEADS, 9, 16 + ROPE_DIM)
        assert value.shape == (1, NUM_HEADS, 9, 20)
    assert attention_of(module).expand_kv(latent, rotated)[1] is None


def test_a_model_without_latents_stays_as_it_is() -> None:
    module = AutoModelForCausalLM.from_config(MODELS["llama"])
    LatentParts(module, is_exact=True)
    assert not hasattr(attention_of(module), "latent_heads")


def _add_bias(part: Any) -> None:
    part.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(part.kv_b_proj.out_features))


def _scale_expansion(part: Any) -> None:
    expand_kv = part.expand_kv
    part.expand_kv = lambda latent, rotated: tuple(1.01 * each for each in expand_kv(latent, rotated))


def _add_indexer(part: Any) -> None:
    part.indexer = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_add_bias, r"DeepseekV3Attention: expected kv_b_proj to compute keys and values from latents, got Linear"),
        (_scale_expansion, r"DeepseekV3Attention: expected expand_kv to apply only kv_b_proj, got more"),
        (_add_indexer, r"DeepseekV3Attention: expected attention to all latents, got an indexer that chooses some"),
    ],
)
def test_latents_with_another_use_are_rejected(change: Callable[[Any], None], reason: str) -> None:
    module = module_of()
    change(attention_of(module))
    with pytest.raises(UnsupportedModel, match=f"^{reason}"):
        LatentParts(module, is_exact=False)


def test_layers_without_expand_kv_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of()
    monkeypatch.delattr(type(attention_of(module)), "expand_kv")
    with pytest.raises(UnsupportedModel, match=r"^DeepseekV3ForCausalLM: expected layers with a method expand_kv"):
        LatentParts(module, is_exact=False)


def test_matmuls_of_a_head_that_are_not_batch_invariant_are_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemmTuner, "choose", lambda *_: None)
    with pytest.raises(
        UnsupportedModel, match=r"^DeepseekV3Attention\.kv_b_proj: no batch-invariant matmul for a weight of shape"
    ):
        LatentParts(module_of(), is_exact=True)


HEADS = LatentHeads(
    rank=5, absorb=lambda rows: rows.repeat(1, 1, 2)[..., :5], expand=lambda rows: rows[..., :4], rope_dim=2
)


def test_queries_are_absorbed_except_for_the_rope_part() -> None:
    rows = torch.randn(7, 4, 3 + 2)
    queries = HEADS.queries(rows)
    assert torch.equal(queries, torch.cat((rows[..., [0, 1, 2, 0, 1]], rows[..., 3:]), -1))


def test_values_are_expanded_from_the_latent_only() -> None:
    attended = torch.randn(7, 4, 5 + 2)
    assert torch.equal(HEADS.values(attended), attended[..., :4])


class Recorder:
    """A step that records the call, and returns the query plus one."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.key, self.value, self.scoring = call.key, call.value, call.scoring
        return call.query + 1


def test_a_layer_without_values_stores_its_key_once() -> None:
    recorder, query, key = Recorder(), torch.randn(1, 4, 7, 5), torch.randn(1, 1, 7, 7)
    layer = SimpleNamespace(layer_idx=0, is_causal=True, latent_heads=HEADS)
    out, _ = _attention_forward(layer, query, key, None, None, radix_step=recorder)
    assert torch.equal(recorder.key, key[0].transpose(0, 1))
    assert recorder.value is None
    assert recorder.scoring.scale == 5**-0.5, "the head dim is that of the model's queries, not of the stored latents"
    assert torch.equal(out[0], HEADS.values(HEADS.queries(query[0].transpose(0, 1)) + 1))


def test_a_layer_without_values_or_latents_is_refused() -> None:
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    query = torch.randn(1, 4, 7, 5)
    with pytest.raises(UnsupportedModel, match="SimpleNamespace: expected values to attend to, got none"):
        _attention_forward(layer, query, query, None, None, radix_step=Recorder())


def test_an_absorbed_layer_is_not_called() -> None:
    module, layer = nn.Module(), nn.Module()
    layer.kv_b_proj, layer.o_proj = nn.Linear(2, 2), nn.Linear(2, 2)
    module.layer = layer
    assert absorbed_layers(module) == []
    layer.latent_heads = HEADS
    assert absorbed_layers(module) == [layer.kv_b_proj]
