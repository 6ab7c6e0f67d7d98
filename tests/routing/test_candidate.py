from __future__ import annotations

import pytest

from radixkv.routing.candidate import Candidate, Hits, TokenTimes


def test_hits_in_all_tiers_add_up() -> None:
    assert Hits(1, 20, 300, 4000).total == 4321
    assert Candidate("a").hits.total == 0


def test_the_time_of_a_prompt_is_that_of_computed_and_loaded_tokens() -> None:
    times = TokenTimes(compute_s=1.0, host_s=0.25, disk_s=0.5, remote_s=0.75)
    assert times.seconds(100, Hits(device=10)) == 90
    assert times.seconds(100, Hits(10, 20, 30, 40)) == pytest.approx(20 * 0.25 + 30 * 0.5 + 40 * 0.75)


def test_tokens_that_load_more_slowly_than_they_compute_are_computed() -> None:
    assert TokenTimes(compute_s=1.0, remote_s=9.0).seconds(100, Hits(remote=60)) == 100
