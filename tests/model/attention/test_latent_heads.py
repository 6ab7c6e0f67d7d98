from types import SimpleNamespace

import pytest
import torch
from torch import nn

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import _attention_forward
from radixkv.model.attention.latent_heads import LatentHeads, absorbed_layers

HEADS = LatentHeads(
    rank=5, absorb=lambda rows: rows.repeat(1, 1, 2)[..., :5], expand=lambda rows: rows[..., :4], rope_dim=2
)


def test_a_query_is_absorbed_but_for_its_rotated_part() -> None:
    rows = torch.randn(7, 4, 3 + 2)
    queries = HEADS.queries(rows)
    assert torch.equal(queries, torch.cat((rows[..., [0, 1, 2, 0, 1]], rows[..., 3:]), -1))


def test_values_are_made_of_the_latent_alone() -> None:
    attended = torch.randn(7, 4, 5 + 2)
    assert torch.equal(HEADS.values(attended), attended[..., :4])


class Recorder:
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        self.key, self.value, self.scoring = key, value, scoring
        return query + 1


def test_a_layer_without_values_stores_its_key_once() -> None:
    recorder, query, key = Recorder(), torch.randn(1, 4, 7, 5), torch.randn(1, 1, 7, 7)
    layer = SimpleNamespace(layer_idx=0, is_causal=True, latent_heads=HEADS)
    out, _ = _attention_forward(layer, query, key, None, None, radix_step=recorder)
    assert torch.equal(recorder.key, key[0].transpose(0, 1))
    assert recorder.value is None
    assert recorder.scoring.scale == 5**-0.5, "of the model's queries, not of what is stored"
    assert torch.equal(out[0], HEADS.values(HEADS.queries(query[0].transpose(0, 1)) + 1))


def test_a_layer_without_values_or_latents_is_refused() -> None:
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    query = torch.randn(1, 4, 7, 5)
    with pytest.raises(UnsupportedModel, match="SimpleNamespace: expected values to attend to, got none"):
        _attention_forward(layer, query, query, None, None, radix_step=Recorder())


def test_a_layer_whose_weight_the_heads_have_sees_no_rows() -> None:
    module, layer = nn.Module(), nn.Module()
    layer.kv_b_proj, layer.o_proj = nn.Linear(2, 2), nn.Linear(2, 2)
    module.layer = layer
    assert absorbed_layers(module) == []
    layer.latent_heads = HEADS
    assert absorbed_layers(module) == [layer.kv_b_proj]
