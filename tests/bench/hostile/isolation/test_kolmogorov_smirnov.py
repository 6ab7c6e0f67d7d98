import numpy as np
import pytest

from bench.hostile.isolation.kolmogorov_smirnov import p_value


def test_samples_of_one_distribution_have_a_high_p_value():
    numbers = np.random.default_rng(1)
    assert p_value(numbers.normal(size=250), numbers.normal(size=250)) > 0.05


def test_a_shift_by_half_a_deviation_is_detected():
    numbers = np.random.default_rng(1)
    assert p_value(numbers.normal(size=250), numbers.normal(size=250) + 0.5) < 1e-4


def test_a_known_value():
    """The distance is 0.25; a hundred values each give the scale 1.8057, and twice exp(-2 x 1.8057^2)."""
    assert p_value(range(100), range(25, 125)) == pytest.approx(0.0029, abs=0.0002)
    assert p_value([1, 2, 3], [1, 2, 3]) == 1.0
