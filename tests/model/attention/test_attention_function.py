from types import SimpleNamespace

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import ATTENTION_NAME, _attention_forward
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.loading import load_model

LAYER = SimpleNamespace(layer_idx=1, is_causal=True)
QUERY, KEY = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)


class Recorder:
    """A step that records the call, and returns the query plus one."""

    def attend(self, call: AttentionCall):
        self.layer, self.scoring, self.query = call.layer, call.scoring, call.query
        return call.query + 1


def call(**kwargs: object):
    """Call the attention function for `LAYER`; `mask` is its attention mask."""
    return _attention_forward(LAYER, QUERY, KEY, KEY, kwargs.pop("mask", None), **kwargs)


def test_rows_of_tokens_are_passed_to_the_step_and_back() -> None:
    recorder = Recorder()
    out, weights = call(radix_step=recorder, scaling=0.5, sliding_window=7, softcap=30.0)
    assert recorder.layer == 1
    assert recorder.scoring == Scoring(0.5, window=7, softcap=30.0)
    assert recorder.query.shape == (3, 4, 8)
    assert torch.equal(out, QUERY.transpose(1, 2) + 1)
    assert weights is None


def test_the_scale_defaults_to_one_over_the_root_of_the_head_dimension() -> None:
    recorder = Recorder()
    call(radix_step=recorder)
    assert recorder.scoring == Scoring(8**-0.5)


def test_a_forward_without_its_step_raises() -> None:
    module = load_model(ModelConfig(device="cpu")).module
    assert module.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(UnsupportedModel, match="expected to attend within a forward pass over the cache, got none"):
        module(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)


def test_a_layer_without_its_number_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="`layer_idx`"):
        _attention_forward(SimpleNamespace(is_causal=True), QUERY, KEY, KEY, None, radix_step=Recorder())


def test_sinks_are_scored() -> None:
    recorder, sinks = Recorder(), torch.ones(4)
    call(radix_step=recorder, s_aux=sinks)
    assert recorder.scoring.sinks is sinks


@pytest.mark.parametrize(
    "options",
    [{"s_aux": torch.ones(1, 4, 3, 1)}, {"s_aux": torch.ones(4), "softcap": 30.0}],
    ids=["by token", "softcap"],
)
def test_sinks_of_another_kind_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="expected `s_aux` with one sink per query head, and no `softcap`"):
        call(radix_step=Recorder(), **options)


@pytest.mark.parametrize("keyword", ["position_bias", "indices", "anything_new"])
def test_a_keyword_that_changes_attention_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"passes `{keyword}`"):
        call(radix_step=Recorder(), **{keyword: torch.ones(1)})


def test_a_keyword_that_is_none_is_ignored() -> None:
    out, _ = call(radix_step=Recorder(), s_aux=None)
    assert out.shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    "options", [{"mask": torch.ones(1)}, {"dropout": 0.1}, {"is_causal": False}], ids=["mask", "dropout", "not causal"]
)
def test_masks_dropout_and_non_causal_attention_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="expected"):
        call(radix_step=Recorder(), **options)
