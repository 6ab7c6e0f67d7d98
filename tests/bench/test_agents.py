"""What the measurements of turns after tools conclude."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.agents import Turn, non_negative_fit, summary


def test_the_fit_finds_the_parameters_of_exact_times() -> None:
    rows = np.array([[1.0, 64, 9e3], [1, 256, 1e5], [1, 1024, 5e5], [1, 1024, 3e6]])
    assert non_negative_fit(rows, rows @ [0.01, 1e-4, 2e-8]) == pytest.approx([0.01, 1e-4, 2e-8])


def test_no_parameter_is_negative() -> None:
    rows = np.array([[1.0, 1], [1, 2], [1, 3]])
    assert non_negative_fit(rows, np.array([1.0, 3.0, 5.0]))[0] == 0


def test_a_turn_is_ready_if_nothing_is_loaded_or_computed_again() -> None:
    assert Turn(1.0, 1.0, 0, 0).is_ready
    assert not Turn(1.0, 1.0, 64, 0).is_ready
    assert not Turn(1.0, 1.0, 0, 64).is_ready


def test_the_summary_counts_timely_turns() -> None:
    turns = [Turn(1.05, 1.0, 0, 0), Turn(1.2, 1.0, 64, 0), Turn(3.0, 1.0, 0, 100), Turn(0.9, 1.0, 0, 0)]
    play: Any = SimpleNamespace(turns=turns, ttfts_s=[1.0, 2.0, 3.0], cached_tokens=80, prompt_tokens=100)
    found = summary(play)
    assert (found["returns"], found["ready_share"], found["timely_share"]) == (4, 0.5, 0.5)
    assert (found["loaded_tokens"], found["computed_again_tokens"], found["hit_rate"]) == (64, 100, 0.8)
    assert found["ttft_p50_s"] == 2.0
