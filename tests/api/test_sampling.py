import math

import pytest

from radixkv.api.sampling import MAX_STOP_TOKEN_IDS, Sampling
from radixkv.errors import InvalidRequest

VOCAB_SIZE = 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -0.1}, "temperature: expected a finite number from 0, got -0.1"),
        ({"temperature": math.nan}, "temperature: expected a finite number from 0, got nan"),
        ({"temperature": math.inf}, "temperature: expected a finite number from 0, got inf"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected more than 0 and at most 1, got 1.5"),
        ({"top_p": math.nan}, "top_p: expected more than 0 and at most 1, got nan"),
        ({"seed": 2**64}, "seed: expected 0 to 2.*, got 18446744073709551616"),
        ({"seed": 7.0}, "seed: expected 0 to 2.*, got 7.0"),
        ({"seed": "7"}, "seed: expected 0 to 2.*, got '7'"),
        ({"stop_token_ids": frozenset({5, VOCAB_SIZE})}, "stop_token_ids: expected ids below the vocabulary size 300"),
        (
            {"stop_token_ids": frozenset(range(MAX_STOP_TOKEN_IDS + 1))},
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {MAX_STOP_TOKEN_IDS + 1}",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        Sampling(**fields).validate(2000 if "at most" in message and "stop" in message else VOCAB_SIZE)


def test_bounds_are_allowed() -> None:
    for sampling in (Sampling(1, 0.0, 1.0, 0), Sampling(1, 1e9, 1e-9, 2**64 - 1, frozenset({0, VOCAB_SIZE - 1}))):
        sampling.validate(VOCAB_SIZE)
        assert sampling.max_new_tokens == 1


def test_without_a_seed_each_has_its_own() -> None:
    assert len({Sampling().seed for _ in range(100)}) == 100
