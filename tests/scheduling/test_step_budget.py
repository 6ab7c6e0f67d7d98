"""If the device has too little memory for a step, the step is tried again with fewer tokens, and no request fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from radixkv.compute.forward import Chunk
from radixkv.compute.runner import StepResult
from radixkv.errors import OutOfMemory
from radixkv.scheduling.step_budget import StepBudget
from tests.core_bench import Bench
from tests.fake_runner import next_token, tokens


class SmallDevice:
    """Makes the runner of a bench raise PyTorch's out-of-memory error for steps of more than `max_tokens` tokens."""

    def __init__(self, bench: Bench, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tried_tokens: list[int] = []  # of each call of `run`
        self._run = bench.runner.run
        bench.runner.run = self.run  # type: ignore[method-assign]

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        self.tried_tokens.append(sum(chunk.num_tokens for chunk in chunks))
        if self.tried_tokens[-1] > self.max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._run(chunks)


def test_a_step_that_does_not_fit_is_halved_until_it_does() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=512)
    device = SmallDevice(bench, 100)
    prompts = [list(range(i, i + 120)) for i in range(4)]
    futures = [bench.submit(prompt) for prompt in prompts]
    decoding = bench.generate(range(300, 310), 20)
    bench.run()
    assert device.tried_tokens[:4] == [490, 245, 122, 61]
    assert max(device.tried_tokens[3:]) == 61
    assert [future.result(0).next_token_id for future in futures] == [next_token(tokens(p)) for p in prompts]
    assert len(decoding.result(0).token_ids) == 20
    assert bench.core.num_failed_steps == 0


def test_a_copied_block_is_copied_again_when_its_step_is_tried_again() -> None:
    bench = Bench(num_blocks=64)
    bench.prefill(range(6))
    device = SmallDevice(bench, 3)
    assert bench.prefill([*range(6), *range(50, 58)]).usage.computed_tokens == 8
    assert device.tried_tokens == [8, 4, 2, 2, 2, 2]


def test_a_request_without_memory_for_one_token_fails_and_others_continue() -> None:
    bench = Bench(num_blocks=64)
    device = SmallDevice(bench, 0)
    refused, behind = bench.submit(range(8)), bench.submit(range(20, 28))
    while not refused.done():
        bench.core.step()
        bench.cache.check()
    assert isinstance(refused.exception(0), OutOfMemory)
    assert device.tried_tokens == [16, 8, 4, 2, 1]
    assert bench.core.num_failed_steps == 1
    device.max_tokens = 512
    bench.run()
    assert behind.result(0).next_token_id == next_token(tokens(range(20, 28)))
    assert bench.core.num_failed_steps == 0
    assert bench.cache.pool.num_leased == 0


@pytest.mark.parametrize(("num_tokens", "halved"), [(512, 256), (3, 1), (2, 1), (1, 1)])
def test_a_step_is_halved_down_to_one_token(num_tokens: int, halved: int) -> None:
    budget = StepBudget(512)
    assert budget.shrink(num_tokens) == (num_tokens > 1)
    assert budget.num_tokens == halved


def test_the_budget_is_doubled_after_64_steps_that_fit() -> None:
    budget = StepBudget(500)
    budget.shrink(400)
    sizes = []
    for _ in range(200):
        budget.grow()
        sizes.append(budget.num_tokens)
    assert sizes[62:65] == [200, 400, 400]
    assert sizes[126:129] == [400, 500, 500]
    assert sizes[-1] == 500


def test_a_step_that_does_not_fit_restarts_the_count_of_steps_that_fit() -> None:
    budget = StepBudget(512)
    budget.shrink(512)
    for _ in range(63):
        budget.grow()
    budget.shrink(256)
    for _ in range(63):
        budget.grow()
    assert budget.num_tokens == 128
