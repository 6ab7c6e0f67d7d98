from __future__ import annotations

import re

import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import BeyondCeiling, PromptTooLong, SwitchedOff


def limits(**given: object) -> Limits:
    fields = {
        "model": "tiny",
        "device": "cpu",
        "vocab_size": 256,
        "max_model_tokens": None,
        "num_blocks": 10,
        "block_size": 16,
        "ceiling_blocks": {},
    }
    return Limits.of_pool(**{**fields, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_model_tokens", "prompt", "sequence"), [(None, 160, 144), (1000, 160, 144), (150, 150, 144), (100, 100, 100)]
)
def test_the_pool_and_the_model_bound_what_is_served(max_model_tokens: int | None, prompt: int, sequence: int) -> None:
    given = limits(max_model_tokens=max_model_tokens)
    assert (given.max_prompt_tokens, given.max_sequence_tokens) == (prompt, sequence)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "got 200; the pool has room for 160 tokens (cache.capacity_tokens)"),
        ({"max_model_tokens": 100}, "got 200; the limit of the model (max_position_embeddings in config.json)"),
        ({"max_model_tokens": 100, "model_limit_reason": "longrope; choose"}, "got 200; longrope; choose"),
        ({"max_model_tokens": 1000, "model_limit_reason": "longrope; choose"}, "got 200; the pool has room"),
    ],
)
def test_a_refusal_says_what_sets_the_limit(given: dict[str, object], reason: str) -> None:
    with pytest.raises(PromptTooLong, match=re.escape(reason)):
        limits(**given).require_tokens(bytes(4 * 200))
    params = PrefillParams(bytes(4 * 90), Caller(""))
    with pytest.raises(PromptTooLong, match=re.escape(reason.removeprefix("got 200"))):
        limits(**given).require_generation(params, Sampling(200))


def test_ceilings_are_reported_in_tokens() -> None:
    given = limits(ceiling_blocks={"a": 3, "b": None}, default_ceiling_blocks=2)
    assert (given.ceiling_tokens, given.default_ceiling_tokens) == ({"a": 48, "b": None}, 32)
    assert [given.max_new_tokens(16, tenant) for tenant in ("a", "b", "c")] == [33, 128, 17]


def test_every_pool_has_an_epoch_of_its_own() -> None:
    assert limits().epoch != limits().epoch


def asked(num_tokens: int, max_new_tokens: int, compression: Compression, tenant: str = "") -> tuple[object, ...]:
    sampling = Sampling(max_new_tokens, compression=compression)
    return PrefillParams(bytes(4 * num_tokens), Caller(tenant)), sampling


def test_a_compressed_generation_is_bounded_by_what_it_keeps() -> None:
    budget = Compression(CompressionPolicy.STREAMING_LLM, 32)
    limits().require_generation(*asked(128, 1_000_000, budget))  # 8 blocks and 2
    for num_tokens, max_new_tokens, compression, message in (
        (129, 5, budget, "token_ids, compression.max_tokens: expected at most 160 tokens of K/V together"),
        (128, 34, Compression(CompressionPolicy.SNAPKV, 2), "token_ids, compression.max_tokens: expected at most 160"),
    ):
        with pytest.raises(PromptTooLong, match=message):
            limits().require_generation(*asked(num_tokens, max_new_tokens, compression))
    with pytest.raises(PromptTooLong, match="token_ids, max_new_tokens: expected at most 150 tokens together"):
        limits(max_model_tokens=150).require_generation(*asked(100, 51, budget))
    with pytest.raises(BeyondCeiling, match=r"token_ids, compression.max_tokens: expected at most 48 tokens of K/V"):
        limits(ceiling_blocks={"a": 3}).require_generation(*asked(17, 50, budget, "a"))
    limits(ceiling_blocks={"a": 3}).require_generation(*asked(16, 50, budget, "a"))


def test_a_model_that_does_not_allow_compression_is_reported_with_the_reason() -> None:
    given = limits(compression_refusal="a model with sliding windows")
    with pytest.raises(SwitchedOff, match=r"^compression: expected a model that allows it, got a model with sliding"):
        given.require_generation(*asked(9, 9, Compression(CompressionPolicy.H2O, 8)))
    given.require_generation(PrefillParams(bytes(36)), Sampling(9))
