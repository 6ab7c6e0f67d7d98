import numpy as np
import pytest

from bench.hostile.isolation.kolmogorov_smirnov import p_value


def test_samples_of_one_distribution_have_a_high_p_value():
    rng = np.random.default_rng(1)
    assert p_value(rng.normal(size=250), rng.normal(size=250)) > 0.05


def test_a_shift_by_half_a_deviation_is_detected():
    rng = np.random.default_rng(1)
    assert p_value(rng.normal(size=250), rng.normal(size=250) + 0.5) < 1e-4


def test_the_p_value_is_that_of_the_formula():
    """For the distance 0.25 of two samples of 100, the statistic is 1.8057, and p is 2 * exp(-2 * 1.8057^2)."""
    assert p_value(range(100), range(25, 125)) == pytest.approx(0.0029, abs=0.0002)
    assert p_value([1, 2, 3], [1, 2, 3]) == 1.0
