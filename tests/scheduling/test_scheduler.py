"""A short prompt does not wait for a long document, and short prompts do not starve the document."""

import numpy as np
import pytest

from tests.core_bench import BLOCK_SIZE, Bench


def tokens_of_steps(bench: Bench) -> list[int]:
    """Return how many tokens each step computed."""
    return [sum(end - start for start, end in step) for step in bench.runner.steps]


def test_a_short_prompt_is_answered_in_the_step_after_it_arrived() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    long = bench.submit(range(400))
    for _ in range(3):
        bench.core.step()
    short = bench.submit([900, 901, 902])
    bench.core.step()
    assert short.done()
    assert not long.done()
    assert bench.runner.steps[-1] == [(0, 3), (48, 61)], "of 16 tokens, the long prompt gets those that are left"
    bench.run()
    assert max(tokens_of_steps(bench)) == 16


def test_a_long_prompt_that_is_mostly_cached_is_answered_in_the_step_after_it_arrived() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    bench.prefill(range(500, 600))
    long = bench.submit(range(400))
    bench.core.step()
    hit = bench.submit([*range(500, 600), 1, 2])
    miss = bench.submit(range(700, 800))
    bench.core.step()
    assert hit.done()
    assert not miss.done()
    assert not long.done()
    bench.run()


def test_many_short_prompts_slow_a_long_one_down_to_half_its_speed_at_most() -> None:
    bench = Bench(num_blocks=1024, max_step_tokens=16)
    long = bench.submit(range(400))
    bench.core.step()
    shorts = []
    while not long.done():
        shorts += [bench.submit([1000 + len(shorts), i]) for i in range(8)]
        bench.core.step()
    assert len(bench.runner.steps) <= 400 / 8 + 2, "the long prompt gets half of the 16 tokens of a step"
    assert sum(short.done() for short in shorts) >= 4 * (len(bench.runner.steps) - 2)
    bench.run()


def test_a_prompt_longer_than_the_share_of_short_prompts_waits_for_its_turn() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    bench.submit(range(100))
    bench.core.step()
    medium, short = bench.submit(range(200, 205)), bench.submit(range(300, 304))
    bench.core.step()
    assert not medium.done()
    assert short.done()
    bench.run()


def test_no_request_overtakes_while_all_fit() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    bench.submit(range(20))
    bench.core.step()
    futures = [bench.submit(range(start, start + 3)) for start in (100, 200, 300, 400)]
    bench.core.step()
    assert bench.runner.steps[-1] == [(16, 20), (0, 3), (0, 3), (0, 3), (0, 3)]
    assert all(future.done() for future in futures)


def test_short_prompts_take_no_blocks_from_a_large_one_that_waits_for_them() -> None:
    bench = Bench(num_blocks=12, max_step_tokens=16)
    bench.submit(range(9 * BLOCK_SIZE))
    big = bench.submit(range(100, 100 + 11 * BLOCK_SIZE))
    shorts = []
    while not big.done():
        shorts.append(bench.submit([1000 + len(shorts)]))
        bench.core.step()
        bench.cache.check()
    assert (
        len(bench.runner.steps) <= 3 + 4
    )  # as many steps as both take if a quarter of each step is left to short prompts
    bench.run()


def test_a_short_prompt_for_which_there_are_no_blocks_waits() -> None:
    bench = Bench(num_blocks=12, max_step_tokens=16)
    bench.submit(range(12 * BLOCK_SIZE))
    bench.core.step()
    short = bench.submit([1000])
    bench.core.step()
    assert not short.done()
    bench.run()
    assert short.done()


@pytest.mark.parametrize("long_tokens", [40, 80], ids=["next to a full step", "in a full step"])
def test_a_short_prompt_is_answered_while_a_large_one_waits_for_blocks(long_tokens: int) -> None:
    bench = Bench(num_blocks=30, max_step_tokens=16)
    bench.submit(range(long_tokens))
    bench.core.step()
    big = bench.submit(range(100, 100 + 25 * BLOCK_SIZE), tenant="big")
    bench.core.step()
    short, generation = bench.submit([1000, 1001]), bench.generate([2000, 2001], 5)
    bench.core.step()
    assert short.done()
    assert generation.streamed == [], "it would keep its block for longer than this step"
    assert not big.done()
    bench.run()


def test_a_prompt_with_more_tokens_left_than_the_first_one_does_not_overtake_it() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    bench.submit(range(40))
    bench.core.step()
    bench.submit(range(100, 200))
    bench.core.step()
    assert bench.runner.steps[-1] == [(16, 32)]
    bench.run()


def test_generations_that_grow_together_get_adjacent_blocks() -> None:
    bench = Bench(num_blocks=512, max_step_tokens=512)
    futures = [bench.generate(range(100 * n, 100 * n + 10 + n), 40) for n in range(16)]
    while min(len(future.streamed) for future in futures) < 38:
        bench.core.step()
    for request in bench.core._scheduler.running:
        id_steps = np.diff(request.open_lease.block_ids)
        assert id_steps.size >= 11
        # If a prompt ends inside a block, its last block was copied into the next one, so that the lease skips an id.
        ends_in_a_block = request.params.num_tokens % BLOCK_SIZE > 0
        assert sorted(id_steps) == [1] * (id_steps.size - ends_in_a_block) + [2] * ends_in_a_block
    bench.run()
