from __future__ import annotations

import re

import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import BeyondCeiling, PromptTooLong, SwitchedOff


def limits(**fields: object) -> Limits:
    """Return the limits of a pool of 10 blocks of 16 tokens, with these fields changed."""
    defaults = {
        "model": "tiny",
        "device": "cpu",
        "vocab_size": 256,
        "max_model_tokens": None,
        "num_blocks": 10,
        "block_size": 16,
        "ceiling_blocks": {},
    }
    return Limits.of_pool(**{**defaults, **fields})  # type: ignore[arg-type]


# A generation needs one block in addition to those of its tokens, so a pool of 160 tokens has sequences of at most 144.
@pytest.mark.parametrize(
    ("max_model_tokens", "max_prompt_tokens", "max_sequence_tokens"),
    [(None, 160, 144), (1000, 160, 144), (150, 150, 144), (100, 100, 100)],
)
def test_the_pool_and_the_model_bound_prompts_and_sequences(
    max_model_tokens: int | None, max_prompt_tokens: int, max_sequence_tokens: int
) -> None:
    pool_limits = limits(max_model_tokens=max_model_tokens)
    assert pool_limits.max_prompt_tokens == max_prompt_tokens
    assert pool_limits.max_sequence_tokens == max_sequence_tokens


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "; the pool has room for 160 tokens (cache.capacity_tokens)"),
        ({"max_model_tokens": 100}, "; the limit of the model (max_position_embeddings in config.json)"),
        ({"max_model_tokens": 100, "model_limit_reason": "longrope; choose"}, "; longrope; choose"),
        ({"max_model_tokens": 1000, "model_limit_reason": "longrope; choose"}, "; the pool has room"),
    ],
)
def test_a_refusal_says_what_sets_the_limit(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(PromptTooLong, match=re.escape(f"got 200{reason}")):
        limits(**fields).require_tokens(bytes(4 * 200))
    params = PrefillParams(bytes(4 * 90), Caller(""))
    with pytest.raises(PromptTooLong, match=re.escape(reason)):
        limits(**fields).require_generation(params, Sampling(200))


def test_ceilings_are_reported_in_tokens() -> None:
    pool_limits = limits(ceiling_blocks={"a": 3, "b": None}, default_ceiling_blocks=2)
    assert (pool_limits.ceiling_tokens, pool_limits.default_ceiling_tokens) == ({"a": 48, "b": None}, 32)
    max_new_tokens = [pool_limits.max_new_tokens(16, tenant) for tenant in ("a", "b", "c")]
    # Below a ceiling, one more than the tokens that it leaves, since the last new token has no K/V.
    assert max_new_tokens == [48 - 16 + 1, 144 - 16, 32 - 16 + 1]


def test_every_pool_has_an_epoch_of_its_own() -> None:
    assert limits().epoch != limits().epoch


def generation(
    num_prompt_tokens: int, max_new_tokens: int, compression: Compression, tenant: str = ""
) -> tuple[PrefillParams, Sampling]:
    """Return the parameters of a generation with compressed K/V."""
    sampling = Sampling(max_new_tokens, compression=compression)
    return PrefillParams(bytes(4 * num_prompt_tokens), Caller(tenant)), sampling


def test_a_compressed_generation_is_bounded_by_the_entries_that_it_keeps() -> None:
    budget = Compression(CompressionPolicy.STREAMING_LLM, 32)
    # All blocks of the pool: 8 for the prompt, and 2 for the entries that are kept.
    limits().require_generation(*generation(128, 1_000_000, budget))
    for num_prompt_tokens, max_new_tokens, compression, message in (
        (129, 5, budget, "token_ids, compression.max_tokens: expected at most 160 tokens of K/V together"),
        (128, 34, Compression(CompressionPolicy.SNAPKV, 2), "token_ids, compression.max_tokens: expected at most 160"),
    ):
        with pytest.raises(PromptTooLong, match=message):
            limits().require_generation(*generation(num_prompt_tokens, max_new_tokens, compression))
    with pytest.raises(PromptTooLong, match="token_ids, max_new_tokens: expected at most 150 tokens together"):
        limits(max_model_tokens=150).require_generation(*generation(100, 51, budget))
    with pytest.raises(BeyondCeiling, match=r"token_ids, compression.max_tokens: expected at most 48 tokens of K/V"):
        limits(ceiling_blocks={"a": 3}).require_generation(*generation(17, 50, budget, "a"))
    limits(ceiling_blocks={"a": 3}).require_generation(*generation(16, 50, budget, "a"))


def test_a_model_that_does_not_allow_compression_is_reported_with_the_reason() -> None:
    pool_limits = limits(compression_refusal="a model with sliding windows")
    with pytest.raises(SwitchedOff, match=r"^compression: expected a model that allows it, got a model with sliding"):
        pool_limits.require_generation(*generation(9, 9, Compression(CompressionPolicy.H2O, 8)))
    pool_limits.require_generation(PrefillParams(bytes(36)), Sampling(9))
