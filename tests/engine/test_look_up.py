"""Look-ups: what the engine returns about a prompt, from which misses are explained."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import StepResult
from radixkv.namespace import Namespace
from tests.core_bench import Bench
from tests.fake_runner import tokens

FAKE = Namespace("fake")


def test_a_look_up_has_what_a_probe_has_and_where_the_prompt_diverges_from_the_tree() -> None:
    bench = Bench()
    bench.prefill(range(10))
    prompt = tokens([0, 1, 2, 3, 4, 5, 99, 98])
    found, probed = bench.core.look_up(FAKE, prompt), bench.core.probe(FAKE, prompt)
    assert (found.cached_tokens, found.miss_reason) == (probed.cached_tokens, probed.miss_reason)
    assert (found.tokens, found.cached_tokens, found.miss_reason) == (prompt, 6, MissReason.DIVERGED)
    assert found.divergence.left_at == 6
    assert found.divergence.branches[0].tokens(2) == tokens([6, 7])


def test_the_time_per_token_is_that_of_requests_that_compute_many() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=1000)
    assert bench.core.look_up(FAKE, tokens([1])).token_s is None
    run = bench.runner.run
    num_computed = []
    for start, length, seconds in ((0, 127, 50.0), (1000, 128, 12.8), (2000, 200, 40.0)):

        def run_slowly(chunks: Sequence[Chunk], seconds: float = seconds) -> StepResult:
            bench.clock.now_s += seconds
            return run(chunks)

        bench.runner.run = run_slowly  # type: ignore[method-assign]
        num_computed.append(bench.prefill(range(start, start + length)).usage.computed_tokens)
    assert num_computed == [127, 128, 200]
    assert (
        bench.core.look_up(Namespace("fake", "other"), tokens([1])).token_s is None
    )  # another tenant, without measurements
    # 127 tokens are too few to be measured. The weight of earlier requests falls by 5 % with each new one.
    expected = (0.95 * 12.8 + 40.0) / (0.95 * 128 + 200)
    assert bench.core.look_up(FAKE, tokens([1])).token_s == pytest.approx(expected)
