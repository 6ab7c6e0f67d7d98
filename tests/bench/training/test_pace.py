import pytest

from bench.training.pace import Pace, learning_rate


def test_a_run_by_time_ends_with_its_time_whatever_its_speed() -> None:
    pace = Pace(seconds=100)
    assert [pace.share(seconds, steps) for seconds, steps in ((0, 0), (50, 3), (50, 9000), (100, 1))] == [
        0,
        0.5,
        0.5,
        1,
    ]


def test_a_run_by_steps_does_not_look_at_the_clock() -> None:
    assert [Pace(steps=4).share(seconds, 1) for seconds in (0, 1e9)] == [0.25, 0.25]


@pytest.mark.parametrize("budgets", [{}, {"seconds": 1, "steps": 1}])
def test_a_pace_needs_one_budget(budgets: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected either seconds or steps"):
        Pace(**budgets)


def test_the_rate_rises_falls_and_stays_above_zero() -> None:
    rates = [learning_rate(share / 1000, 1.0) for share in range(1100)]
    top = rates.index(max(rates))
    assert rates[0] == 0
    assert rates[top] == pytest.approx(1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[1000] == rates[-1] == pytest.approx(0.02)
