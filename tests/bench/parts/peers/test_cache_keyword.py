"""Finds the keyword argument with which a model takes a cache."""

from __future__ import annotations

import inspect

from transformers import LlamaForCausalLM

from bench.parts.peers.cache_keyword import cache_keyword


class OfOldVersions:
    def forward(self, input_ids: object, past_key_values: object = None) -> None: ...


class OfNewVersions:
    def forward(self, input_ids: object, cache: object = None) -> None: ...


def test_the_keyword_is_a_parameter_of_the_models_forward() -> None:
    assert cache_keyword(OfOldVersions()) == "past_key_values"
    assert cache_keyword(OfNewVersions()) == "cache"
    assert (
        cache_keyword(LlamaForCausalLM.__new__(LlamaForCausalLM))
        in inspect.signature(LlamaForCausalLM.forward).parameters
    )
