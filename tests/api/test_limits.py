from __future__ import annotations

import pytest

from radixkv.api.limits import Limits


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


def test_ceilings_are_told_in_tokens() -> None:
    given = limits(ceiling_blocks={"a": 3, "b": None}, default_ceiling_blocks=2)
    assert (given.ceiling_tokens, given.default_ceiling_tokens) == ({"a": 48, "b": None}, 32)
    assert [given.most_new_tokens(16, tenant) for tenant in ("a", "b", "c")] == [33, 128, 17]


def test_every_pool_has_an_epoch_of_its_own() -> None:
    assert limits().epoch != limits().epoch
