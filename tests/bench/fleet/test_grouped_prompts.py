from __future__ import annotations

import statistics
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bench.fleet.grouped_prompts import Geometry, PromptOutcome, ask_one, random_arrivals, summarize


def test_only_prompts_of_a_group_share_a_prefix() -> None:
    prompts = Geometry(4, 3, 20, 5, 1).make_prompts(seed=1)
    assert sorted(len(prompt) for prompt in prompts) == [25] * 12
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 4
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert prompts == Geometry(4, 3, 20, 5, 1).make_prompts(seed=1)
    assert prompts != Geometry(4, 3, 20, 5, 1).make_prompts(seed=2)


def test_arrivals_are_a_poisson_process_with_the_given_rate() -> None:
    arrivals_s = random_arrivals(10_000, rate=4.0, seed=1)
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] == pytest.approx(2500, rel=0.05)
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    assert statistics.stdev(gaps_s) == pytest.approx(0.25, rel=0.05)
    assert arrivals_s[:3] == random_arrivals(3, rate=4.0, seed=1)


def test_the_time_to_a_first_token_begins_when_a_prompt_arrives() -> None:
    class Client:
        def generate(self, *_: object, **__: object):
            yield SimpleNamespace(token_ids=[1], usage=SimpleNamespace(cached_tokens=0))

    # The prompt arrived two seconds after the start, and no thread was free for eight more.
    outcome = ask_one(Client(), [1], 1, start_s=time.monotonic() - 10, arrival_s=2.0)
    assert outcome.sent_s == 2.0
    assert outcome.ttft_s is not None
    assert outcome.ttft_s >= 8


def test_a_chunk_without_tokens_has_no_first_token() -> None:
    class Client:
        def generate(self, *_: object, **__: object):
            yield SimpleNamespace(token_ids=[], usage=SimpleNamespace(cached_tokens=3))

    outcome = ask_one(Client(), [1], 1)
    assert (outcome.ttft_s, outcome.token_ids, outcome.cached_tokens) == (None, (), 3)


def test_a_pass_is_summarized() -> None:
    outcomes = [
        PromptOutcome(0.0, 0.1, 0.3, (1, 2), 5),
        PromptOutcome(1.0, 0.3, 0.5, (1,), 0),
        PromptOutcome(2.0, None, 0.1, (), 0, "gone"),
    ]
    summary = summarize(outcomes, [[0] * 10] * 3)
    assert (summary["requests"], summary["errors"]) == (3, 1)
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["token_hit_rate"]) == (20, 5, 0.25)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["seconds"] == pytest.approx(2.1)
    assert summarize([outcomes[2]], [[0]])["ttft_ms"] is None
