import pytest

from radixkv.offload.load_or_compute import LoadOrCompute

BLOCK_SIZE = 64


def measured(token_s: float = 1e-3, loads: dict[str, tuple[float, float]] | None = None) -> LoadOrCompute:
    """Return a `LoadOrCompute` with measurements.

    Args:
        token_s: seconds to compute a token; by default, a block takes 0.064 s.
        loads: seconds per call and seconds per block of a load, by tier.
    """
    load_or_compute = LoadOrCompute(BLOCK_SIZE)
    load_or_compute.note_step(token_s * 512, [(0, 512)])
    for tier, (call_s, block_s) in (loads or {}).items():
        for num_blocks in (1, 10, 4):
            load_or_compute.note_start(tier, num_blocks)
            load_or_compute.note_end(tier, num_blocks, call_s + block_s * num_blocks)
    return load_or_compute


def test_a_tier_without_measurements_is_used() -> None:
    assert LoadOrCompute(BLOCK_SIZE).choose(0, ["host"] * 3) == 3
    assert measured().choose(0, ["host"] * 3) == 3


def test_a_fast_store_is_read() -> None:
    load_or_compute = measured(loads={"host": (1e-3, 1e-4)})
    assert load_or_compute.choose(0, ["host"] * 5) == 5
    assert load_or_compute._load_s({"host": 5}) == pytest.approx(1e-3 + 5e-4)
    assert load_or_compute._seconds_per_token(0) == pytest.approx(1e-3)


def test_a_slow_store_is_not_read() -> None:
    assert measured(loads={"disk": (0.0, 0.1)}).choose(0, ["disk"] * 5) == 0


def test_a_call_that_takes_long_is_worth_it_for_many_blocks_only() -> None:
    load_or_compute = measured(loads={"remote": (0.5, 1e-3)})
    assert load_or_compute.choose(0, ["remote"] * 5) == 0
    assert load_or_compute.choose(0, ["remote"] * 20) == 20


def test_only_the_blocks_before_a_slow_tier_are_loaded() -> None:
    load_or_compute = measured(loads={"host": (1e-3, 1e-4), "disk": (1.0, 0.1)})
    assert load_or_compute.choose(0, ["host"] * 3 + ["disk"] * 4) == 3


def test_the_time_to_fill_the_pool_counts() -> None:
    load_or_compute = measured(loads={"host": (1e-3, 1e-4)})
    load_or_compute.note_fill(4, 4 * 0.05)
    assert load_or_compute.choose(0, ["host"] * 5) == 5
    assert load_or_compute._load_s({"host": 5}) == pytest.approx(1e-3 + 5 * (1e-4 + 0.05))
    load_or_compute.note_fill(4, 4 * 0.5)
    assert load_or_compute.choose(0, ["host"] * 5) == 0


def test_a_pool_that_filled_slowly_is_filled_again_after_a_while() -> None:
    load_or_compute = measured(loads={"host": (0.0, 1e-4)})
    load_or_compute.note_fill(4, 4 * 0.1)
    num_not_loaded = 0
    while not load_or_compute.choose(0, ["host"]):
        load_or_compute.shrink_estimates(["host"])
        num_not_loaded += 1
    assert 10 < num_not_loaded < 100


def test_requests_without_stored_blocks_change_no_estimate() -> None:
    load_or_compute = measured(loads={"host": (0.0, 1e-4)})
    load_or_compute.note_fill(4, 4 * 0.1)
    before_s = load_or_compute._load_s({"host": 1})
    for _ in range(100):
        load_or_compute.shrink_estimates([])
    assert load_or_compute._load_s({"host": 1}) == before_s
    assert not load_or_compute.choose(0, ["host"])


def test_queued_blocks_make_a_store_slower() -> None:
    load_or_compute = measured(loads={"host": (0.0, 0.05)})
    assert load_or_compute.choose(0, ["host"] * 2) == 2
    load_or_compute.note_start("host", 10)
    assert load_or_compute.choose(0, ["host"] * 2) == 0
    load_or_compute.note_end("host", 10, None)
    assert load_or_compute.choose(0, ["host"] * 2) == 2


def test_times_per_token_are_measured_by_position() -> None:
    load_or_compute = measured(loads={"host": (0.0, 0.1)})
    load_or_compute.note_step(512 * 2e-3, [(8192, 8704)])
    assert load_or_compute.choose(0, ["host"]) == 0
    assert load_or_compute.choose(8192, ["host"]) == 1
    assert load_or_compute.choose(100_000, ["host"]) == 1


def test_new_measurements_replace_old_ones() -> None:
    load_or_compute = measured(loads={"host": (0.0, 0.1)})
    assert load_or_compute.choose(0, ["host"]) == 0
    for _ in range(200):
        load_or_compute.note_start("host", 4)
        load_or_compute.note_end("host", 4, 4 * 0.01)
    assert load_or_compute.choose(0, ["host"]) == 1


def test_decode_steps_do_not_count_as_prefill() -> None:
    load_or_compute = measured(loads={"host": (0.0, 0.1)})
    for _ in range(200):
        load_or_compute.note_step(1.0, [(100, 101), (200, 201)])
    assert load_or_compute.choose(0, ["host"]) == 0


def test_steps_with_more_tokens_have_more_weight() -> None:
    few, many = (measured(loads={"host": (0.0, 0.1)}) for _ in range(2))
    for _ in range(10):
        few.note_step(2 * 3e-3, [(0, 2)])
        many.note_step(512 * 3e-3, [(0, 512)])
    assert few.choose(0, ["host"]) == 0
    assert many.choose(0, ["host"]) == 1


def test_without_stored_blocks_nothing_is_loaded() -> None:
    assert measured().choose(0, []) == 0


def test_blocks_are_looked_up_if_computing_takes_longer_than_the_lookup() -> None:
    load_or_compute = measured()
    assert load_or_compute.is_lookup_worthwhile("redis", 0, 1)
    load_or_compute.note_lookup("redis", 0.1)
    assert not load_or_compute.is_lookup_worthwhile("redis", 0, 64)
    assert load_or_compute.is_lookup_worthwhile("redis", 0, 128)


def test_a_tier_that_was_too_slow_is_tried_again_after_a_while() -> None:
    load_or_compute = measured(loads={"disk": (0.0, 0.1)})
    load_or_compute.note_lookup("redis", 0.1)
    assert not load_or_compute.choose(0, ["disk"])
    for _ in range(40):
        load_or_compute.shrink_estimates(["disk", "redis", "host"])
    assert load_or_compute.choose(0, ["disk"])
    assert load_or_compute.is_lookup_worthwhile("redis", 0, 64)
