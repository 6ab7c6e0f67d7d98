"""Constraints in the engine: they mask the logits, have one matcher per completion, and affect no other request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv.api.result import FinishReason
from radixkv.api.sampling import Sampling
from radixkv.engine import step
from radixkv.engine.sampler import LogitChanges, allowed_tokens, change_logits
from radixkv.errors import InvalidRequest, StepFailed
from tests.constraints import Rising, RisingMatcher
from tests.core_bench import Bench

VOCAB_SIZE = 256
SAMPLING = {"temperature": 5.0, "seed": 3}


@pytest.fixture
def started_matchers(monkeypatch: pytest.MonkeyPatch) -> list[RisingMatcher]:
    """The matchers that the test has started so far."""
    matchers: list[RisingMatcher] = []
    start = Rising.start

    def start_and_record(constraint: Rising, stop_token_ids: frozenset[int]) -> RisingMatcher:
        matchers.append(start(constraint, stop_token_ids))
        return matchers[-1]

    monkeypatch.setattr(Rising, "start", start_and_record)
    return matchers


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_only_allowed_tokens_are_sampled(temperature: float, started_matchers: list[RisingMatcher]) -> None:
    bench = Bench()
    future = bench.generate(range(9), 12, temperature=temperature, seed=3, constraint=Rising(VOCAB_SIZE, 20))
    bench.run()
    token_ids = future.result(0).token_ids
    assert [*token_ids] == sorted(set(token_ids))
    assert max(np.diff([-1, *token_ids])) <= 20
    assert len(token_ids) == 12
    assert future.result(0).finish_reason is FinishReason.LENGTH
    (matcher,) = started_matchers
    assert matcher.num_masks == 12, "the mask is computed once per token"
    assert tuple(matcher.accepted) == token_ids


def test_a_generation_ends_when_its_constraint_allows_no_more_tokens() -> None:
    bench = Bench()
    future = bench.generate(range(9), 100, **SAMPLING, constraint=Rising(VOCAB_SIZE, 60))
    bench.run()
    result = future.result(0)
    assert result.token_ids[-1] == VOCAB_SIZE - 1
    assert len(result.token_ids) < 50
    assert result.finish_reason is FinishReason.STOP
    assert future.streamed == [*result.token_ids[:-1]]


def test_a_stop_token_is_sampled_where_it_is_allowed_and_not_passed_to_the_matcher(
    started_matchers: list[RisingMatcher],
) -> None:
    bench = Bench()
    constraint = Rising(VOCAB_SIZE, 1, ends=frozenset({200, 201}))
    future = bench.generate(range(9), 100, **SAMPLING, constraint=constraint, stop_token_ids=frozenset({200}))
    bench.run()
    result = future.result(0)
    assert result.token_ids == (*range(len(result.token_ids) - 1), 200)
    assert result.finish_reason is FinishReason.STOP
    assert 200 not in started_matchers[0].accepted


def test_the_minimum_length_holds_while_a_token_is_allowed_that_does_not_stop() -> None:
    bench = Bench()
    stop_token_ids = frozenset(range(5, VOCAB_SIZE))
    constraint = Rising(VOCAB_SIZE, 1, ends=frozenset({200}))
    sampling = {**SAMPLING, "min_tokens": 8, "stop_token_ids": stop_token_ids, "constraint": constraint}
    future = bench.generate(range(9), 20, **sampling)
    bench.run()
    assert future.result(0).token_ids[:5] == (0, 1, 2, 3, 4)
    assert future.result(0).token_ids[5] in (5, 200), "only stop tokens are allowed there"
    assert len(future.result(0).token_ids) == 6


def test_biases_and_penalties_allow_no_forbidden_token() -> None:
    allowed = np.arange(5) < 2
    sampling = Sampling(
        logit_bias=((4, 100.0),), repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=-2.0, min_tokens=3
    )
    changes = LogitChanges(sampling, np.arange(5), [3, 4, 4], {0}, allowed)
    (logits,) = change_logits(torch.tensor([[-1.0, -2.0, 9.0, -3.0, 5.0]]), [changes])
    assert logits.isinf().tolist() == [False, False, True, True, True]


def test_rows_shorter_than_the_vocabulary_are_masked() -> None:
    changes = LogitChanges(Sampling(), np.arange(0), [], set(), np.array([False, True, False, True, True]))
    (logits,) = change_logits(torch.zeros(1, 3), [changes])
    assert logits.tolist() == [-torch.inf, 0.0, -torch.inf]


def test_a_request_without_an_allowed_token_fails_and_others_continue() -> None:
    bench = Bench()
    others = [bench.generate(range(9), 8, **SAMPLING), bench.generate(range(30), 8)]
    refused = bench.generate(range(9, 20), 8, **SAMPLING, constraint=Rising(VOCAB_SIZE, 9, refuses_after=3))
    bench.run()
    with pytest.raises(InvalidRequest, match="rising: expected"):
        refused.result(0)
    assert len(refused.streamed) == 3
    alone = Bench()
    expected = [alone.generate(range(9), 8, **SAMPLING), alone.generate(range(30), 8)]
    alone.run()
    assert [future.result(0).token_ids for future in others] == [future.result(0).token_ids for future in expected]
    assert bench.cache.pool.num_leased == 0


@pytest.mark.parametrize("method", ["start", "allowed", "accept", "is_finished"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_constraint_that_raises_fails_its_own_request_alone(
    method: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    failing = property(fail) if method == "is_finished" else fail
    monkeypatch.setattr(Rising if method == "start" else RisingMatcher, method, failing)
    bench, alone = Bench(), Bench()
    other = bench.generate(range(9), 8, **SAMPLING)
    failed = bench.generate(range(9, 20), 8, **SAMPLING, constraint=Rising(VOCAB_SIZE, 9))
    bench.run()
    with pytest.raises(StepFailed, match=r"^constraint: failed to "):
        failed.result(0)
    assert "a constraint raised" in caplog.text
    expected = alone.generate(range(9), 8, **SAMPLING)
    alone.run()
    assert other.result(0).token_ids == expected.result(0).token_ids
    assert bench.core.num_failed_steps == bench.cache.pool.num_leased == 0


def test_each_completion_of_a_prompt_has_its_own_matcher_whether_cached_or_not() -> None:
    constraint = Rising(VOCAB_SIZE, 30)
    bench, alone = Bench(), Bench()
    sampling = Sampling(10, **SAMPLING, constraint=constraint)
    together = [bench.generate(range(9), 10, **_sampling_fields(sampling.of_answer(index))) for index in range(3)]
    bench.run()
    cached = bench.generate(range(9), 10, **_sampling_fields(sampling))
    bench.run()
    expected = []
    for index in range(3):
        expected.append(alone.generate(range(9), 10, **_sampling_fields(sampling.of_answer(index)), read_cache=False))
        alone.run()
    answers = [future.result(0).token_ids for future in together]
    assert answers == [future.result(0).token_ids for future in expected]
    assert len(set(answers)) == 3
    assert cached.result(0).token_ids == answers[0]
    assert cached.result(0).usage.cached_tokens == 8


def test_requests_without_a_constraint_compute_no_allowed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    constrained_rows: list[list[int]] = []  # of each step

    def compute_and_record(requests: list[object]) -> dict[int, object]:
        allowed = allowed_tokens(requests)  # type: ignore[arg-type]
        constrained_rows.append([*allowed])
        return allowed  # type: ignore[return-value]

    monkeypatch.setattr(step, "allowed_tokens", compute_and_record)
    bench = Bench()
    bench.generate(range(9), 3, **SAMPLING)
    bench.submit(range(5))
    bench.run()
    assert constrained_rows
    assert not any(constrained_rows)
    bench.generate(range(9), 3, constraint=Rising(VOCAB_SIZE, 9))
    bench.generate(range(20), 3, **SAMPLING)
    bench.run()
    assert constrained_rows[-1] == [0]


def _sampling_fields(sampling: Sampling) -> dict[str, object]:
    names = ("temperature", "seed", "constraint")
    return {name: getattr(sampling, name) for name in names}
