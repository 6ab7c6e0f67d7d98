from __future__ import annotations

import pytest

from bench.fleet.grouped_prompts import Geometry, Told, summarize


def test_prompts_of_a_group_begin_alike_and_no_others() -> None:
    prompts = Geometry(4, 3, 20, 5, 1).make_prompts(seed=1)
    assert sorted(len(prompt) for prompt in prompts) == [25] * 12
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 4
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert prompts == Geometry(4, 3, 20, 5, 1).make_prompts(seed=1)
    assert prompts != Geometry(4, 3, 20, 5, 1).make_prompts(seed=2)


def test_a_pass_is_summed_up() -> None:
    told = [Told(0.0, 0.1, 0.3, (1, 2), 5), Told(1.0, 0.3, 0.5, (1,), 0), Told(2.0, None, 0.1, (), 0, "gone")]
    summary = summarize(told, [[0] * 10] * 3)
    assert (summary["requests"], summary["errors"]) == (3, 1)
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["token_hit_rate"]) == (20, 5, 0.25)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["seconds"] == pytest.approx(2.1)
    assert summarize([told[2]], [[0]])["ttft_ms"] is None
