from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.api.sampling import Sampling
from radixkv.engine.sampler import draw
from tests.core_bench import Bench

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draws(count: int, **fields: float) -> Counter[int]:
    sampling = Sampling(seed=1, **fields)
    return Counter(int(draw(PROBABILITIES.log(), sampling, position)) for position in range(count))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(0)
    seen = draws(4000, temperature=temperature)
    for token_id, probability in enumerate(expected.tolist()):
        # Four standard deviations: once in 3,000 runs by chance, and the seeds are fixed.
        assert abs(seen[token_id] / 4000 - probability) < 4 * (probability * (1 - probability) / 4000) ** 0.5


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(1e-9, {0}), (0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.95, {0, 1, 2, 3}), (1.0, set(range(5)))],
)
def test_top_p_keeps_the_fewest_tokens_that_have_so_much_together(top_p: float, allowed: set[int]) -> None:
    assert set(draws(600, temperature=1.0, top_p=top_p)) == allowed


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.0, seed=7)
    first = [int(draw(logits, sampling, position)) for position in range(50)]
    torch.manual_seed(99)
    assert [int(draw(logits, sampling, position)) for position in range(50)] == first
    assert len(set(first)) > 25
    assert [int(draw(logits, Sampling(temperature=1.0, seed=8), position)) for position in range(50)] != first


def test_a_low_temperature_is_nearly_greedy_and_a_huge_logit_harmless() -> None:
    logits = torch.tensor([1e30, 1e30, -1e30])
    assert {int(draw(logits, Sampling(temperature=1e-30, seed=s), 0)) for s in range(50)} == {0, 1}
    assert {int(draw(PROBABILITIES.log(), Sampling(temperature=0.01, seed=s), 0)) for s in range(50)} == {0}


class _Calls(TorchDispatchMode):
    """Notes which functions are called on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_draw_asks_the_device_for_nothing(top_p: float) -> None:
    """A tensor whose shape depends on values has to wait for them, and so has reading a value."""
    with _Calls() as calls:
        draw(PROBABILITIES.log(), Sampling(temperature=1.0, top_p=top_p, seed=1), 0)
    assert len(calls.names) > 5
    assert not [name for name in calls.names if "_local_scalar" in name or "nonzero" in name or "index" in name]


def test_a_generation_draws_by_its_position_and_others_take_the_most_likely_token() -> None:
    bench = Bench(num_blocks=256)
    bench.runner.logits_scale = 0.0  # every token is as likely as any other
    drawn = bench.generate(range(8), 40, temperature=1.0, seed=3)
    greedy = bench.generate(range(8), 40)
    bench.run()
    assert len(set(drawn.result(0).token_ids)) > 20
    assert set(greedy.result(0).token_ids) == {0}
