import math

import pytest

from radixkv.api.sampling import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, Sampling
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
        ({"top_k": -1}, "top_k: expected at least 0, got -1"),
        ({"min_p": -0.1}, "min_p: expected 0 to 1, got -0.1"),
        ({"min_p": 1.1}, "min_p: expected 0 to 1, got 1.1"),
        ({"min_p": math.nan}, "min_p: expected 0 to 1, got nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: expected 1e-06 to 1e\+06, got 0.0"),
        ({"repetition_penalty": 1e-46}, r"repetition_penalty: expected 1e-06 to 1e\+06, got 1e-46"),
        ({"repetition_penalty": math.inf}, r"repetition_penalty: expected 1e-06 to 1e\+06, got inf"),
        ({"repetition_penalty": math.nan}, r"repetition_penalty: expected 1e-06 to 1e\+06, got nan"),
        ({"presence_penalty": 2.5}, "presence_penalty: expected -2 to 2, got 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: expected -2 to 2, got nan"),
        ({"min_tokens": -1}, "min_tokens: expected 0 to max_new_tokens, 16, got -1"),
        ({"min_tokens": 17}, "min_tokens: expected 0 to max_new_tokens, 16, got 17"),
        (
            {"min_tokens": 1, "stop_token_ids": frozenset(range(VOCAB_SIZE))},
            "min_tokens: expected a token that is not in stop_token_ids, got none",
        ),
        (
            {"logit_bias": ((VOCAB_SIZE, 1.0),)},
            "logit_bias: expected ids from 0 to below the vocabulary size 300, got 300",
        ),
        ({"logit_bias": ((7, 100.5),)}, "logit_bias: expected -100 to 100 for token 7, got 100.5"),
        ({"logit_bias": ((7, math.nan),)}, "logit_bias: expected -100 to 100 for token 7, got nan"),
        (
            {"logit_bias": tuple((i, 1.0) for i in range(MAX_BIASED_TOKENS + 1))},
            f"logit_bias: expected at most {MAX_BIASED_TOKENS} tokens, got {MAX_BIASED_TOKENS + 1}",
        ),
        ({"logprobs": -1}, "logprobs: expected 0 to 100, got -1"),
        ({"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs: expected 0 to 100, got 101"),
        ({"seed": 2**64}, "seed: expected 0 to 2.*, got 18446744073709551616"),
        ({"seed": 7.0}, "seed: expected 0 to 2.*, got 7.0"),
        ({"seed": "7"}, "seed: expected 0 to 2.*, got '7'"),
        (
            {"stop_token_ids": frozenset({5, VOCAB_SIZE})},
            "stop_token_ids: expected ids from 0 to below the vocabulary size 300, got 300",
        ),
        (
            {"stop_token_ids": frozenset({-1})},
            "stop_token_ids: expected ids from 0 to below the vocabulary size 300, got -1",
        ),
        (
            {"stop_token_ids": frozenset(range(MAX_STOP_TOKEN_IDS + 1))},
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {MAX_STOP_TOKEN_IDS + 1}",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        Sampling(**fields).validate(VOCAB_SIZE)


def test_the_bounds_of_each_range_are_valid() -> None:
    for sampling in (
        Sampling(max_new_tokens=1, temperature=0.0, top_p=1.0, seed=0),
        Sampling(
            max_new_tokens=1,
            temperature=1e9,
            top_p=1e-9,
            seed=2**64 - 1,
            stop_token_ids=frozenset({0, VOCAB_SIZE - 1}),
        ),
        Sampling(
            top_k=10**9,
            min_p=1.0,
            repetition_penalty=1e-6,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            min_tokens=16,
            logit_bias=((0, -100.0), (VOCAB_SIZE - 1, 100.0)),
        ),
    ):
        sampling.validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.1},
        {"min_tokens": 1},
        {"logit_bias": ((0, 0.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
    ids=str,
)
def test_only_greedy_sampling_of_unchanged_logits_takes_the_most_likely_token(fields: dict[str, object]) -> None:
    assert Sampling(top_k=1, min_p=0.5).takes_most_likely
    assert not Sampling(**fields).takes_most_likely


def test_each_sampling_without_a_seed_gets_its_own() -> None:
    assert len({Sampling().seed for _ in range(100)}) == 100
