import pytest

from radixkv.planning.time_model import LoadTime
from radixkv.service.cli.plan_report import min_loaded_blocks


@pytest.mark.parametrize(
    ("latency_s", "min_blocks"),
    [(0.0, 1), (0.0009, 1), (0.0011, 2), (0.0101, 11), (0.0999, 100), (8.2, None)],
)
def test_a_run_is_loaded_if_that_saves_more_than_its_latency(latency_s, min_blocks):
    """A block takes 1 ms to load and 2 ms to compute."""
    assert min_loaded_blocks(LoadTime(1e9, latency_s), 10**6, 16, tokens_per_s=8000) == min_blocks


def test_a_store_that_is_slower_than_computing_is_never_loaded_from():
    # A block of 16 tokens takes 1 ms to load, and a little less to compute.
    assert min_loaded_blocks(LoadTime(1e9), 10**6, 16, tokens_per_s=16_100) is None
