from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from radixkv.model.fingerprint import fingerprint_kv, fingerprint_model
from tests.model.exact.checkpoints import CONFIGS


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIGS["llama"])


def change_one_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[50, 33] ^= 1  # the last bit of one number


def exchange_two_weights(model: PreTrainedModel) -> None:
    first, second = (model.model.layers[layer].self_attn for layer in (0, 1))
    first.q_proj.weight, second.q_proj.weight = second.q_proj.weight, first.q_proj.weight


def change_a_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq *= 2


def change_the_rope(model: PreTrainedModel) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}


def round_to_bfloat16(model: PreTrainedModel) -> None:
    model.bfloat16()


def shorten_the_window(model: PreTrainedModel) -> None:
    model.config.sliding_window = 8


@pytest.mark.parametrize(
    "change",
    [
        change_one_weight, exchange_two_weights, change_a_buffer, change_the_rope, round_to_bfloat16,
        shorten_the_window,
    ],
)  # fmt: skip
def test_everything_that_changes_k_and_v_changes_the_fingerprint(
    change: Callable[[PreTrainedModel], None], model: PreTrainedModel
) -> None:
    changed = copy.deepcopy(model)
    before = fingerprint_model(changed, "auto", is_exact=True)
    assert before == fingerprint_model(model, "auto", is_exact=True)
    change(changed)
    assert fingerprint_model(changed, "auto", is_exact=True) != before


def test_the_way_of_computing_is_in_the_fingerprint(model: PreTrainedModel) -> None:
    ways = [("auto", True), ("auto", False), ("int8", True)]
    assert len({fingerprint_model(model, weights, is_exact=is_exact) for weights, is_exact in ways}) == 3


def test_the_path_of_a_model_is_not_in_its_fingerprint(model: PreTrainedModel) -> None:
    moved = copy.deepcopy(model)
    moved.config._name_or_path = "elsewhere"
    moved.config.transformers_version = "of tomorrow"
    assert fingerprint_model(moved, "auto", is_exact=True) == fingerprint_model(model, "auto", is_exact=True)


def test_the_pool_is_in_the_fingerprint_of_cached_blocks() -> None:
    kinds = [("a", "fp32", 16), ("b", "fp32", 16), ("a", "int8", 16), ("a", "fp32", 64), ("a", "fp321", 6)]
    assert len({fingerprint_kv(*kind) for kind in kinds}) == len(kinds)
    assert fingerprint_kv(*kinds[0]) == fingerprint_kv(*kinds[0])


def test_all_weights_are_read_and_the_time_is_logged(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "radixkv.model.fingerprint"):
        fingerprint_model(model, "auto", is_exact=True)
    num_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert caplog.messages[0].startswith(f"read {num_bytes / 1e6:.1f} MB of weights for the model's fingerprint in ")
