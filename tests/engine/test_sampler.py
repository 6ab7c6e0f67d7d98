"""Sampling: which tokens are drawn, how logits are changed, and which log probabilities are returned."""

import math
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, TokenLogprobs
from radixkv.api.sampling import REPETITION_PENALTIES, Sampling
from radixkv.engine import sampler
from radixkv.engine.sampler import LogitChanges, change_logits
from radixkv.scheduling.request import Generation, Request
from tests.constraints import Rising
from tests.core_bench import Bench
from tests.engine import reference_sampler as reference
from tests.fake_runner import VOCAB_SIZE, next_token, one_hot, tokens
from tests.fakes import MODEL


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Draw a token from a single row of logits."""
    return sampler.draw(logits[None], [sampling], [position])[0]


def penalize(logits: torch.Tensor, *changes: Any) -> torch.Tensor:
    """Change a single row of logits. The arguments are those of `LogitChanges`."""
    return change_logits(logits[None], [LogitChanges(*changes)])[0]


PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def count_draws(count: int, **fields: float) -> Counter[int]:
    """Draw from `PROBABILITIES` at successive positions, and count the tokens."""
    sampling = Sampling(seed=1, **fields)
    return Counter(int(draw(PROBABILITIES.log(), sampling, position)) for position in range(count))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_by_their_probabilities(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(0)
    seen = count_draws(4000, temperature=temperature)
    for token_id, probability in enumerate(expected.tolist()):
        # Four standard deviations: with random seeds, one of 3,000 runs would fail; these seeds are fixed.
        assert abs(seen[token_id] / 4000 - probability) < 4 * (probability * (1 - probability) / 4000) ** 0.5


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-9, {0}), (0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.95, {0, 1, 2, 3}), (1.0, set(range(5)))],
)
def test_top_p_keeps_the_smallest_set_of_tokens_that_reaches_it(top_p: float, expected: set[int]) -> None:
    assert drawn_tokens(top_p=top_p) == expected


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.0, seed=7)
    first = [int(draw(logits, sampling, position)) for position in range(50)]
    torch.manual_seed(99)
    assert [int(draw(logits, sampling, position)) for position in range(50)] == first
    assert len(set(first)) > 25
    assert [int(draw(logits, Sampling(temperature=1.0, seed=8), position)) for position in range(50)] != first


def test_a_low_temperature_is_nearly_greedy_and_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([1e30, 1e30, -1e30])
    assert {int(draw(logits, Sampling(temperature=1e-30, seed=s), 0)) for s in range(50)} == {0, 1}
    assert {int(draw(PROBABILITIES.log(), Sampling(temperature=0.01, seed=s), 0)) for s in range(50)} == {0}


def drawn_tokens(**fields: float) -> set[int]:
    """Return the tokens that are ever drawn from `PROBABILITIES`."""
    return set(count_draws(600, temperature=1.0, **fields))


@pytest.mark.parametrize(("top_k", "expected"), [(1, {0}), (3, {0, 1, 2}), (5, set(range(5))), (99, set(range(5)))])
def test_top_k_keeps_the_most_likely_tokens(top_k: int, expected: set[int]) -> None:
    assert drawn_tokens(top_k=top_k) == expected


@pytest.mark.parametrize(("min_p", "expected"), [(0.05, set(range(5))), (0.1, {0, 1, 2, 3}), (0.4, {0, 1}), (1.0, {0})])
def test_min_p_is_a_share_of_the_largest_probability(min_p: float, expected: set[int]) -> None:
    assert drawn_tokens(min_p=min_p) == expected


@pytest.mark.parametrize("seed", range(8))
def test_top_k_top_p_and_min_p_keep_the_tokens_that_transformers_keeps(seed: int) -> None:
    """All three at once, in transformers' order, ties included."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, generator=generator).mul(8).round().div(4)  # many are equal
    top_k, top_p, min_p, temperature = 3 + 4 * seed, 0.5 + seed / 20, 0.02 * seed + 0.01, 0.5 + seed / 4
    scores = logits[None] / temperature
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = set(torch.flatten(torch.nonzero(scores[0] > -torch.inf)).tolist())
    sampling = Sampling(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = {int(draw(logits, sampling, position)) for position in range(3000)}
    assert seen <= expected | tied(logits, expected)
    assert len(seen) == len(expected)


def tied(logits: torch.Tensor, kept: set[int]) -> set[int]:
    """Return the tokens as likely as the least likely kept one. Which of them top_p keeps depends on the sort."""
    least = min(float(logits[token_id]) for token_id in kept)
    return set(torch.flatten(torch.nonzero(logits == least)).tolist())


def test_penalties_are_those_of_transformers_and_of_the_openai_api() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    prompt, answer, stops = [3, 3, 9, 4], [4, 7, 7, 7, 12], [7, 29]
    everything = torch.tensor([prompt + answer])
    prompt_ids = np.unique(prompt)

    def penalized(**fields: Any) -> torch.Tensor:
        return penalize(logits, Sampling(**fields), prompt_ids, answer, stops)

    expected = RepetitionPenaltyLogitsProcessor(1.7)(everything, logits[None].clone())[0]
    assert torch.equal(penalized(repetition_penalty=1.7), expected)
    counts = torch.bincount(torch.tensor(answer), minlength=30)
    expected = logits - 0.5 * (counts > 0) - 0.25 * counts
    assert torch.allclose(penalized(presence_penalty=0.5, frequency_penalty=0.25), expected)
    biased = SequenceBiasLogitsProcessor({(5,): 3.0, (7,): -2.0})(everything, logits[None].clone())[0]
    assert torch.equal(penalized(logit_bias=((5, 3.0), (7, -2.0))), biased)
    for min_tokens, is_short in ((5, False), (6, True)):
        processor = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, stops)
        assert torch.equal(penalized(min_tokens=min_tokens), processor(everything, logits[None].clone())[0])
        assert bool(penalized(min_tokens=min_tokens)[29].isinf()) == is_short


def test_tokens_without_a_logit_have_no_penalty() -> None:
    logits = torch.ones(30)
    penalized = penalize(logits, Sampling(repetition_penalty=2.0), np.array([3, 30, 500]), [], [])
    assert penalized.tolist() == [0.5 if token_id == 3 else 1.0 for token_id in range(30)]


def test_stop_tokens_and_biases_without_a_logit_change_nothing() -> None:
    logits, no_ids = torch.randn(30, generator=torch.Generator().manual_seed(0)), np.arange(0)
    sampling = Sampling(min_tokens=3, logit_bias=((4, 1.0), (30, 2.0), (-1, 2.0)))
    got = penalize(logits, sampling, no_ids, [], {-1, 7, 30, 50_256})
    expected = logits.clone()
    expected[4] += 1.0
    expected[7] = -torch.inf
    assert torch.equal(got, expected)
    all_allowed = np.ones(40, dtype=np.bool_)
    assert torch.equal(penalize(logits, sampling, no_ids, [], {-1, 7, 30, 50_256}, all_allowed), expected)


def test_the_minimum_length_is_ignored_if_only_a_stop_token_has_a_logit() -> None:
    allowed = np.isin(np.arange(40), (7, 35))
    got = penalize(torch.zeros(30), Sampling(min_tokens=3), np.arange(0), [], {7}, allowed)
    assert got.isfinite().nonzero().tolist() == [[7]]


def test_the_minimum_length_is_ignored_if_every_token_is_a_stop_token() -> None:
    """The model has more input tokens than logits, so its vocabulary has other tokens."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(penalize(logits, Sampling(min_tokens=3), np.arange(0), [], set(range(30))), logits)


@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_no_penalty_makes_a_logit_nan(penalty: float) -> None:
    logits = torch.tensor([-1e6, 1e6, 0.0, 1.0])
    sampling = Sampling(repetition_penalty=penalty, min_tokens=3, temperature=1.0, seed=1)
    got = penalize(logits, sampling, np.arange(4), [1], {3})
    assert got.isfinite().tolist() == [True, True, True, False]
    assert draw(got, sampling, 1).item() in range(3)


def test_the_models_logits_are_left_as_they_are() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, min_tokens=9, logit_bias=((1, 5.0),))
    assert not torch.equal(penalize(logits, sampling, np.arange(5), [1, 2], [3]), before)
    assert torch.equal(logits, before)


class _CallRecorder(TorchDispatchMode):
    """Records which functions are called on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("narrowed", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_a_draw_does_not_wait_for_the_device(narrowed: dict[str, Any]) -> None:
    """Making a tensor whose shape depends on values waits for the device, and so does reading a value."""
    with _CallRecorder() as calls:
        draw(PROBABILITIES.log(), Sampling(temperature=1.0, **narrowed, seed=1), 0)
    assert len(calls.names) > 5
    assert not [name for name in calls.names if "_local_scalar" in name or "nonzero" in name or "index" in name]


def test_a_generation_samples_by_its_position_and_greedy_ones_take_the_most_likely_token() -> None:
    bench = Bench(num_blocks=256)
    bench.runner.logits_scale = 0.0  # every token is as likely as any other
    drawn = bench.generate(range(8), 40, temperature=1.0, seed=3)
    greedy = bench.generate(range(8), 40)
    bench.run()
    assert len(set(drawn.result(0).token_ids)) > 20
    assert set(greedy.result(0).token_ids) == {0}


def test_penalties_and_the_minimum_length_hold_in_greedy_generations() -> None:
    bench = Bench(num_blocks=256)
    bench.runner.logits_scale = 0.0  # every token is as likely as any other, so the lowest id is taken
    plain = bench.generate(range(8), 5)
    without_repetition = bench.generate(range(8), 5, presence_penalty=1.0)
    without_prompt = bench.generate([0, 1, 5], 3, logit_bias=((0, -5.0), (1, -5.0), (2, -5.0)))
    late = bench.generate(range(8), 5, min_tokens=2, stop_token_ids=frozenset({0}))
    bench.run()
    assert plain.result(0).token_ids == (0,) * 5
    assert without_repetition.result(0).token_ids == (0, 1, 2, 3, 4)
    assert without_prompt.result(0).token_ids == (3, 3, 3)
    assert late.result(0).token_ids == (1, 1, 0)


@pytest.mark.parametrize("constraint", [None, Rising(VOCAB_SIZE, 60)])
def test_a_stop_token_without_a_logit_fails_no_request(constraint: Rising | None) -> None:
    bench, alone = Bench(), Bench()
    stops = frozenset({-1, VOCAB_SIZE, 50_256})
    with_stop_tokens = bench.generate(
        range(8), 4, temperature=1.0, seed=1, min_tokens=3, stop_token_ids=stops, constraint=constraint
    )
    other = bench.generate(range(20, 30), 6)
    bench.run()
    assert len(with_stop_tokens.result(0).token_ids) == 4
    expected = alone.generate(range(20, 30), 6)
    alone.run()
    assert other.result(0).token_ids == expected.result(0).token_ids


def test_log_probabilities_are_the_models_own_whatever_is_sampled() -> None:
    bench = Bench(num_blocks=256)
    chunks: list[GeneratedTokens] = []
    plain = bench.generate(range(8), 6, chunks.append, logprobs=3)
    penalized_chunks: list[GeneratedTokens] = []
    penalized = bench.generate(
        range(8), 6, penalized_chunks.append, temperature=1.0, seed=2, presence_penalty=2.0, logprobs=0
    )
    without_logprobs = bench.generate(range(8), 6)
    bench.run()
    result = plain.result(0)
    streamed = [logprobs for each in [*chunks, result] for logprobs in each.logprobs]
    assert len(result.logprobs) == 1
    assert [each.top[0] for each in streamed] == [
        (token_id, each.logprob) for token_id, each in zip(result.token_ids, streamed, strict=True)
    ]
    assert all(len(each.top) == 3 and each.top[0][1] >= each.top[1][1] >= each.top[2][1] for each in streamed)
    prefill = bench.submit(range(8), return_logits=True)
    bench.run()
    row = torch.from_numpy(prefill.result(0).logits).log_softmax(0)
    penalized_token, penalized_logprobs = penalized.result(0).token_ids[0], penalized_chunks[0].logprobs[0]
    assert penalized_logprobs.logprob == pytest.approx(float(row[penalized_token]))
    assert penalized_logprobs.top == ()
    assert without_logprobs.result(0).logprobs == ()


@pytest.mark.parametrize("count", [0, 5])
def test_log_probabilities_of_rows_are_read_in_one_copy(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy to the host waits for the device."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    reads: list[torch.Tensor] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor) or cpu(tensor))
    with _CallRecorder() as calls:
        read = read_logprobs(logits[None], [7], count)[0]
    assert len(reads) == 1
    assert not [name for name in calls.names if "_local_scalar" in name]
    expected = logits.log_softmax(0)
    assert read.logprob == float(expected[7])
    assert read.top == tuple((int(i), float(expected[i])) for i in logits.argsort(descending=True)[:count])


def random_request(rng: random.Random, vocab_size: int) -> Request:
    """Return a prefill or a generation with random options, some of which change nothing."""
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
    params = PrefillParams(tokens(prompt), top_logprobs=rng.choice((0, 0, 1, 5)), return_logits=rng.random() < 0.2)
    generation = None
    if rng.random() < 0.8:
        sampling = Sampling(
            100,
            temperature=rng.choice((0.0, 0.3, 1.0, 2.5)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.1)),
            top_k=rng.choice((0, 0, 1, 40, 10**6)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=rng.randrange(2**64),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.7)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, -0.25)),
            min_tokens=rng.choice((0, 0, 9)),
            logit_bias=rng.choice(((), ((3, 1.5), (vocab_size + 1, 2.0)))),
            logprobs=rng.choice((None, None, 0, 3, 7)),
        )
        stops = frozenset({rng.randrange(vocab_size)})
        generation = Generation(sampling, stops, lambda _: None, rng.choices(range(vocab_size), k=rng.randrange(12)))
    return Request(params, MODEL, Future(), 0.0, generation)


def predict_by_reference(row: torch.Tensor, request: Request) -> tuple[int, list[TokenLogprobs]]:
    """Choose the next token of a row, and read its log probabilities, by the sampler of one row at a time."""
    generation, token_id, count = request.generation, int(row.argmax()), request.params.top_logprobs or None
    if generation is not None:
        sampling, changed = generation.sampling, row
        count = sampling.logprobs
        if sampling.changes_logits:
            prompt_ids = np.unique(np.frombuffer(request.params.tokens, "<u4")).astype(np.int64)
            changed = reference.penalize(row, sampling, prompt_ids, generation.token_ids, generation.stop_token_ids)
        token_id = int(changed.argmax())
        if sampling.temperature:
            token_id = int(reference.draw(changed, sampling, request.num_tokens))
    if count is None:
        return token_id, []
    (own, *top), ids = reference.logprobs_of(row, token_id, count)
    return token_id, [TokenLogprobs(own, tuple(zip(ids, top, strict=True)))]


@pytest.mark.parametrize("vocab_size", [97, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng, vocab_size) for _ in range(24)]
    logits = torch.randn(len(requests), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if seed % 2:
        logits = logits.mul(4).round().div(4)  # many are equal
    expected = [predict_by_reference(row, request) for row, request in zip(logits, requests, strict=True)]
    order = list(range(len(requests)))
    while order:
        batch = [requests[index] for index in order]
        rows = logits[order]
        before = rows.clone()
        predictions = sampler.predict(rows, rows.argmax(dim=-1).tolist(), batch, {})
        assert [(each.next_token_id, list(each.logprobs)) for each in predictions] == [expected[i] for i in order]
        for prediction, row, request in zip(predictions, rows, batch, strict=True):
            if request.params.return_logits:
                assert np.array_equal(prediction.logits, row.numpy())
            else:
                assert prediction.logits is None
        assert torch.equal(rows, before), "the model's logits are left as they are"
        rng.shuffle(order)
        order = order[: len(order) * 2 // 3]


def test_a_step_is_read_in_one_copy_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This does not depend on how many rows are sampled or have log probabilities."""
    rng = random.Random(0)
    requests = [random_request(rng, 300) for _ in range(40)]
    requests = [request for request in requests if not request.params.return_logits]
    logits = torch.randn(len(requests), 300)
    most_likely = logits.argmax(dim=-1).tolist()
    reads: list[torch.Tensor] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor) or cpu(tensor))
    with _CallRecorder() as calls:
        sampler.predict(logits, most_likely, requests, {})
    assert len(reads) == 1
    assert not [name for name in calls.names if "_local_scalar" in name or "nonzero" in name]


def test_operations_per_step_do_not_grow_with_its_rows_but_for_the_noise() -> None:
    counts = {}
    for num_rows in (8, 64):
        requests = []
        for index in range(num_rows):
            sampling = Sampling(
                100, temperature=1.0, top_p=0.9, min_p=0.01, seed=index, presence_penalty=0.5, logprobs=2
            )
            generation = Generation(sampling, frozenset(), lambda _: None, [1, 2])
            requests.append(Request(PrefillParams(tokens(range(8))), MODEL, Future(), 0.0, generation))
        logits = torch.randn(num_rows, 300)
        with _CallRecorder() as calls:
            sampler.predict(logits, [0] * num_rows, requests, {})
        counts[num_rows] = Counter(calls.names)
    grown = counts[64] - counts[8]
    assert {name.partition(".")[2].partition(".")[0] for name in grown} == {"exponential_"}
    assert sum(grown.values()) == 64 - 8


def read_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log probabilities of one token per row, and of the `count` most likely tokens."""
    table = LogprobTable()
    table.put(0, sampler.read_logprob_rows(logits, token_ids, count))
    return list(table)


def test_streamed_log_probabilities_are_freed() -> None:
    bench = Bench(num_blocks=256)
    streamed: list[weakref.ref[object]] = []
    future = bench.generate(range(8), 20, lambda chunk: streamed.append(weakref.ref(chunk.logprobs)), logprobs=3)
    bench.run()
    assert len(streamed) == 19
    assert not [each for each in streamed if each() is not None]
    assert len(future.result(0).logprobs) == 1


def test_a_generation_that_is_stopped_early_streams_nothing_twice() -> None:
    bench = Bench(num_blocks=256)
    chunks: list[GeneratedTokens] = []
    future = bench.generate(range(8), 20, chunks.append, logprobs=3)
    while len(chunks) < 3:
        bench.core.step()
    future.finish()
    bench.run()
    assert len(chunks) == len(future.result(0).token_ids)
    assert future.result(0).logprobs == ()


def prompt_logprobs(ids: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities that the fake model gives a prompt."""
    rows = torch.stack([one_hot(next_token(tokens(ids[:upto]))) for upto in range(1, len(ids))])
    return tuple(read_logprobs(rows, list(ids[1:]), count))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 70, 150])
@pytest.mark.parametrize("max_step_tokens", [5, 16, 512])
def test_log_probabilities_of_a_prompt_come_with_its_first_token(length: int, max_step_tokens: int) -> None:
    bench = Bench(num_blocks=512, max_step_tokens=max_step_tokens)
    ids = [7 * n % 250 for n in range(length)]
    chunks: list[GeneratedTokens] = []
    options = {"prompt_logprobs": 2, "read_cache": False}
    long = bench.generate(ids, 4, chunks.append, **options)
    short = bench.generate(ids, 1, **options)
    plain = [bench.generate(ids, 4) for _ in range(2)]
    bench.run()
    expected = prompt_logprobs(ids, 2) if length > 1 else ()
    assert chunks[0].prompt_logprobs == long.result(0).prompt_logprobs == short.result(0).prompt_logprobs == expected
    assert all(each.prompt_logprobs == () for each in chunks[1:])
    assert all(each.result(0).prompt_logprobs == () for each in plain)
    assert {each.result(0).token_ids for each in (long, *plain)} == {plain[0].result(0).token_ids}


def test_a_step_makes_at_most_64_rows_of_logits_of_prompts() -> None:
    bench = Bench(num_blocks=512)
    futures = [bench.generate(range(n, n + 100), 1, prompt_logprobs=0, read_cache=False) for n in range(3)]
    other = bench.generate(range(100, 250), 1)
    bench.run()
    first = bench.runner.steps[0]
    assert sum(end - start for start, end in first) == 64 + 150, "the other prompt is computed at once"
    assert all(sum(end - start for start, end in step) <= 64 for step in bench.runner.steps[1:])
    for n, future in enumerate(futures):
        assert future.result(0).prompt_logprobs == prompt_logprobs(range(n, n + 100), 0)
    assert other.done()


def test_no_more_log_probabilities_are_returned_than_there_are_logits() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    expected = read_logprobs(logits, [3, 4], 8)
    assert read_logprobs(logits, [3, 4], 10) == expected
    assert [len(each.top) for each in expected] == [8, 8]


def test_the_log_probabilities_of_a_preempted_prompt_are_returned_once() -> None:
    bench = Bench(num_blocks=19, max_step_tokens=4)
    ids = range(60)
    older = bench.generate(range(100, 108), 40)
    with_logprobs = bench.generate(ids, 2, prompt_logprobs=1, read_cache=False)
    bench.run()
    assert with_logprobs.result(0).usage.recomputed_tokens > 0, "it must be preempted within its prompt"
    assert with_logprobs.result(0).prompt_logprobs == prompt_logprobs(ids, 1)
    assert len(older.result(0).token_ids) == 40


def test_a_token_without_a_logit_has_no_probability() -> None:
    (read,) = read_logprobs(torch.zeros(1, 8), [8], 1)
    assert read.logprob == -torch.inf
    assert read.top[0][1] == pytest.approx(-math.log(8))
