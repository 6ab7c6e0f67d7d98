"""The keyword argument for the cache is found in the signature of a model."""

from __future__ import annotations

import inspect

from transformers import LlamaForCausalLM

from bench.parts.peers.cache_keyword import cache_keyword


class ModelOfOldVersions:
    def forward(self, input_ids: object, past_key_values: object = None) -> None: ...


class ModelOfNewVersions:
    def forward(self, input_ids: object, cache: object = None) -> None: ...


def test_the_keyword_is_a_parameter_of_the_models_forward() -> None:
    assert cache_keyword(ModelOfOldVersions()) == "past_key_values"
    assert cache_keyword(ModelOfNewVersions()) == "cache"
    model_without_weights = LlamaForCausalLM.__new__(LlamaForCausalLM)
    assert cache_keyword(model_without_weights) in inspect.signature(LlamaForCausalLM.forward).parameters
