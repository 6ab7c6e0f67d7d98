"""NaN or infinite values in the model's output fail the request that they belong to, and no other."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.errors import NotFinite
from tests.core_bench import BLOCK_SIZE, Bench
from tests.fake_runner import continuation, tokens

PROMPT = list(range(10))
OTHER_PROMPT = list(range(50, 60))


def assert_only_one_failed(bench: Bench, failing: Future[Any], other: Future[Any]) -> None:
    """Check that one request failed because of such values, that the other succeeded, and that no block leaks."""
    error = failing.exception(0)
    assert isinstance(error, NotFinite)
    assert str(error).startswith("step: the model computed NaN or infinite values for this request")
    assert other.exception(0) is None
    assert bench.cache.pool.num_leased == 0
    assert len(bench.core.held_leases) == 0


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 3}, {"return_logits": True}, {"hold_lease": True}])
def test_a_prefill_with_nan_fails_and_caches_nothing(options: dict[str, Any]) -> None:
    bench = Bench(max_step_tokens=32)
    bench.runner.not_finite = tokens(PROMPT)
    failing, other = bench.submit(PROMPT, **options), bench.submit(OTHER_PROMPT)
    bench.run()
    assert_only_one_failed(bench, failing, other)
    bench.runner.not_finite = None
    assert bench.prefill(PROMPT).usage.cached_tokens == 0
    assert bench.prefill(OTHER_PROMPT).usage.cached_tokens == len(OTHER_PROMPT) - 1


def test_the_chunks_before_a_chunk_with_nan_stay_cached() -> None:
    bench = Bench(max_step_tokens=BLOCK_SIZE)
    failing = bench.submit(PROMPT)
    bench.core.step()
    bench.runner.not_finite = tokens(PROMPT)
    other = bench.submit(OTHER_PROMPT)
    bench.run()
    assert_only_one_failed(bench, failing, other)
    bench.runner.not_finite = None
    assert bench.prefill(PROMPT).usage.cached_tokens == BLOCK_SIZE


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("num_tokens_before", range(8))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        {"prompt_logprobs": 2, "logit_bias": ((7, 1.0),)},
    ],
    ids=["greedy", "log probabilities", "sampled", "prompt log probabilities and a bias"],
)
def test_a_generation_fails_at_the_token_with_nan_after_sending_those_before_it(
    num_tokens_before: int, options: dict[str, Any]
) -> None:
    bench = Bench(max_step_tokens=64)
    bench.runner.logits_scale = 100.0  # so that the most likely token is sampled
    sent = continuation(PROMPT, num_tokens_before)
    bench.runner.not_finite = tokens([*PROMPT, *sent])
    failing, other = bench.generate(PROMPT, 12, **options), bench.generate(OTHER_PROMPT, 12, **options)
    bench.run()
    assert_only_one_failed(bench, failing, other)
    assert failing.streamed == [*sent]
    assert other.result(0).token_ids == continuation(OTHER_PROMPT, 12)
    bench.runner.not_finite = None
    # The step with NaN publishes nothing, but all earlier ones did: the prompt, and whole blocks of generated tokens.
    num_in_whole_blocks = (len(PROMPT) + num_tokens_before - 1) // BLOCK_SIZE * BLOCK_SIZE
    cached = bench.prefill([*PROMPT, *sent, 255]).usage.cached_tokens
    assert cached == (max(len(PROMPT), num_in_whole_blocks) if num_tokens_before else 0)


def test_only_the_completion_with_nan_fails() -> None:
    bench = Bench(max_step_tokens=64)
    bench.runner.not_finite = tokens([*PROMPT, 77])
    failing = bench.generate(PROMPT, 5, logit_bias=((77, 100.0),))
    other = bench.generate(PROMPT, 5)
    bench.run()
    assert_only_one_failed(bench, failing, other)
    assert failing.streamed == [77]
    assert other.result(0).token_ids == continuation(PROMPT, 5)
