from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, GemmBackend, gemm_backends
from radixkv.kernels.cpu.gemm_trial import GemmChoice, _cache_bytes, choose_gemm, cold_calls
from radixkv.kernels.cpu.row_tiles import SIZES, RowTiles, in_tiles

SIZES_ABOVE_ONE = tuple(size for size in SIZES if size > 1)


def add_backend(monkeypatch: pytest.MonkeyPatch, name: str, multiply: object) -> None:
    monkeypatch.setitem(GEMM_BACKENDS, name, GemmBackend(torch.clone, multiply, (torch.float32,)))  # type: ignore[arg-type]


def try_backend(name: str, weight: torch.Tensor, **keywords: object) -> GemmChoice | None:
    """Choose among one backend in exact mode, with a clock that measures the same time for each call."""
    clock = map(float, itertools.count()).__next__
    return choose_gemm(weight, None, (name,), is_exact=True, clock=clock, **keywords)  # type: ignore[arg-type]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), [(37, 100), (256, 64), (96, 900)])
def test_a_row_does_not_depend_on_the_row_count(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    """Rows are computed in calls of many sizes and at many positions, not only at those that the trial compares."""
    weight = torch.empty(out_features, in_features, dtype=dtype)
    for name in gemm_backends(weight):
        choice = try_backend(name, weight)
        if choice is None:
            continue
        rows, cancelling, _ = sensitive_linear(weight, None, 1100)
        backend = GEMM_BACKENDS[name]
        packed = backend.pack(cancelling)
        any_row_count = dict.fromkeys(range(1, 1101), 1.0)  # allowed if the choice has no costs
        tiles = RowTiles(dict(choice.costs) or any_row_count)

        def multiply(some_rows: torch.Tensor) -> torch.Tensor:
            return in_tiles(lambda tile: backend.multiply(tile, packed, None), some_rows.clone(), tiles)  # noqa: B023

        whole = multiply(rows)
        for start, end in ((0, 1), (1, 4), (4, 20), (20, 53), (53, 600), (599, 600), (600, 1100)):
            assert torch.equal(multiply(rows[start:end]), whole[start:end]), name
        order = torch.randperm(1100, generator=torch.Generator().manual_seed(1))
        assert torch.equal(multiply(rows[order]), whole[order]), name


@pytest.mark.parametrize(
    ("differing_rows", "expected"),
    [(64, tuple(size for size in SIZES if size != 64)), (1, SIZES_ABOVE_ONE), (3, SIZES)],
    ids=["64 rows", "a single row", "3 rows, which are never used"],
)
def test_row_counts_with_different_results_are_excluded(
    differing_rows: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        product = (rows[:, None] * weight).sum(-1)
        if rows.shape[0] == differing_rows:
            product[0] += 1e-3  # only the first of the rows differs
        return product

    add_backend(monkeypatch, "odd", multiply)
    choice = try_backend("odd", torch.empty(5, 8))
    assert choice is not None
    assert tuple(size for size, _ in choice.costs) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_summation_order_is_detected_despite_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a router of a mixture of experts, from 64 features to 4 in bfloat16, one row in a million had other bits."""

    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        # One term per input feature, `[num_rows, out_features]` each.
        terms = list((rows.float().t()[:, :, None] * weight.float().t()[:, None]).unbind())
        if rows.shape[0] == 32:
            terms.reverse()
        return sum(terms).to(rows.dtype)  # type: ignore[union-attr]

    add_backend(monkeypatch, "odd", multiply)
    choice = try_backend("odd", torch.empty(4, 64, dtype=dtype), max_rows=64)
    assert choice is not None
    assert 32 not in dict(choice.costs)
    assert {16, 64} <= set(dict(choice.costs))


def test_backends_that_are_never_batch_invariant_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        return (rows[:, None] * weight).sum(-1) + torch.arange(len(rows))[:, None]

    add_backend(monkeypatch, "odd", multiply)
    assert try_backend("odd", torch.empty(4, 8)) is None


def test_batch_invariant_backends_are_only_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    features_of_calls = add_timed_backend(monkeypatch, now_s, "invariant", 1e-2)
    add_timed_backend(monkeypatch, now_s, "other", 2e-2)
    monkeypatch.setitem(GEMM_BACKENDS, "invariant", GEMM_BACKENDS["invariant"]._replace(is_batch_invariant=True))
    choices = [
        choose_gemm(torch.empty(4, 8), None, ("invariant", "other"), is_exact=is_exact, clock=lambda: now_s[0])
        for is_exact in (True, False)
    ]
    assert choices == [GemmChoice("invariant")] * 2
    # For each of the two choices, two calls with the first features, and two with each of the four scored row counts.
    assert len(features_of_calls) == 2 * (2 + 2 * 4)


@pytest.mark.parametrize(("took_s", "expected"), [(1.4e-3, "invariant"), (1.6e-3, "other")])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("names", [("invariant", "other"), ("other", "invariant")], ids=str)
def test_a_batch_invariant_backend_may_take_half_as_long_again(
    names: tuple[str, str], is_exact: bool, took_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    add_timed_backend(monkeypatch, now_s, "invariant", took_s)
    add_timed_backend(monkeypatch, now_s, "other", 1e-3)
    monkeypatch.setitem(GEMM_BACKENDS, "invariant", GEMM_BACKENDS["invariant"]._replace(is_batch_invariant=True))
    choice = choose_gemm(torch.empty(4, 8), None, names, is_exact=is_exact, clock=lambda: now_s[0])
    assert choice is not None
    assert choice.backend == expected


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_lead_due_to_a_disturbance_is_lost_when_both_are_timed_again(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def add_timed(name: str, seconds: list[float]) -> None:
        """Add a backend whose calls take these seconds in turn; all further calls take the last of them."""

        def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
            nonlocal now_s
            now_s += seconds.pop(0) if len(seconds) > 1 else seconds[0]
            return (rows[:, None] * weight).sum(-1)

        add_backend(monkeypatch, name, multiply)

    # Two calls with the first features, then eight that other processes slow down, two with each of four row counts.
    add_timed("invariant", [1e-2] * 2 + [3e-2] * 8 + [1e-2])
    add_timed("other", [1e-2])
    monkeypatch.setitem(GEMM_BACKENDS, "invariant", GEMM_BACKENDS["invariant"]._replace(is_batch_invariant=True))
    choice = choose_gemm(torch.empty(4, 8), None, ("invariant", "other"), is_exact=is_exact, clock=lambda: now_s)
    assert choice == GemmChoice("invariant")


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_faster_backend_is_chosen(monkeypatch: pytest.MonkeyPatch, *, is_exact: bool) -> None:
    ticks = itertools.count()
    now_s = [0.0]

    def slow(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        now_s[0] += 3e-3 + next(ticks) * 1e-9
        return (rows[:, None] * weight).sum(-1)

    def fast(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        now_s[0] += 1e-3
        return (rows[:, None] * weight).sum(-1)

    add_backend(monkeypatch, "slow", slow)
    add_backend(monkeypatch, "fast", fast)
    for names in (("slow", "fast"), ("fast", "slow")):
        choice = choose_gemm(torch.empty(4, 8), None, names, is_exact=is_exact, clock=lambda: now_s[0])
        assert choice is not None
        assert choice.backend == "fast"
        assert bool(choice.costs) == is_exact


def add_timed_backend(
    monkeypatch: pytest.MonkeyPatch, now_s: list[float], name: str, took_s: float, difference: float = 0.0
) -> list[int]:
    """Add a backend each of whose calls advances `now_s[0]` by `took_s`.

    Its results are 0, plus `difference` times the position of the row in the call.

    Returns:
        A list to which each call adds the number of output features of its weight.
    """
    features: list[int] = []

    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        now_s[0] += took_s
        features.append(len(weight))
        return rows @ weight.t() * 0 + torch.arange(len(rows))[:, None] * difference

    add_backend(monkeypatch, name, multiply)
    return features


def test_a_backend_dropped_early_is_chosen_if_the_fastest_is_not_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    add_timed_backend(monkeypatch, now_s, "fast", 1e-3, difference=1.0)
    add_timed_backend(monkeypatch, now_s, "slow", 4e-3)
    for names in (("slow", "fast"), ("fast", "slow")):
        exact, fast = (
            choose_gemm(torch.empty(4, 8), None, names, is_exact=is_exact, clock=lambda: now_s[0])
            for is_exact in (True, False)
        )
        assert exact is not None
        assert (exact.backend, dict(exact.costs).keys()) == ("slow", {*SIZES})
        assert fast == GemmChoice("fast")


def test_a_far_slower_backend_is_timed_with_a_part_of_the_weight_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    hopeless_features = add_timed_backend(monkeypatch, now_s, "hopeless", 1.0)
    other_features = add_timed_backend(monkeypatch, now_s, "other", 1e-2)
    names = ("hopeless", "other")
    choice = choose_gemm(torch.empty(600, 8), None, names, is_exact=True, clock=lambda: now_s[0])
    assert choice is not None
    assert choice.backend == "other"
    assert set(hopeless_features) == {512}
    assert set(other_features) == {512, 600}


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("limit_s", [0.0, 0.3], ids=["no time", "time for one backend"])
def test_without_time_for_the_others_a_batch_invariant_backend_is_chosen(
    limit_s: float, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    add_timed_backend(monkeypatch, now_s, "fast", 1e-2)
    add_timed_backend(monkeypatch, now_s, "invariant", 5e-2)
    monkeypatch.setitem(GEMM_BACKENDS, "invariant", GEMM_BACKENDS["invariant"]._replace(is_batch_invariant=True))
    choices = [
        choose_gemm(
            torch.empty(600, 8),
            None,
            ("fast", "invariant"),
            is_exact=is_exact,
            limit_s=time_limit_s,
            clock=lambda: now_s[0],
        )
        for time_limit_s in (limit_s, math.inf)
    ]
    assert [choice.backend for choice in choices if choice is not None] == ["invariant", "fast"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_time_may_run_out_anywhere(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even between the check that there is time for a backend and its first call."""
    add_timed_backend(monkeypatch, [0.0], "fast", 0.0)
    add_timed_backend(monkeypatch, [0.0], "other", 0.0)
    for limit_s in range(100):
        clock = map(float, itertools.count()).__next__
        names = ("fast", "other")
        choice = choose_gemm(torch.empty(4, 8), None, names, is_exact=is_exact, limit_s=limit_s, clock=clock)
        assert choice is not None


@pytest.mark.parametrize(
    ("limit_s", "sizes"),
    [(0.0, (1, 8)), (250.0, (1, 8, 64)), (1050.0, (1, 4, 16, 64, 256)), (5000.0, SIZES)],
)
def test_with_less_time_fewer_row_counts_are_checked_and_used(
    limit_s: float, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        now_s[0] += len(rows)  # a second per row
        product = (rows[:, None] * weight).sum(-1)
        if len(rows) == 4:
            product[0] += 1e-3  # only the first of the rows differs, so calls with 4 rows are excluded
        return product

    add_backend(monkeypatch, "odd", multiply)
    choice = choose_gemm(torch.empty(5, 8), None, ("odd",), is_exact=True, limit_s=limit_s, clock=lambda: now_s[0])
    assert choice is not None
    assert tuple(size for size, _ in choice.costs) == tuple(size for size in sizes if size != 4)


@pytest.mark.parametrize("limit_s", [0.0, math.inf])
def test_whether_any_row_counts_agree_does_not_depend_on_the_time(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
        positions = torch.arange(1, len(rows) + 1)[:, None]
        return (rows[:, None] * weight).sum(-1) + positions * (len(rows) < 32)

    add_backend(monkeypatch, "odd", multiply)
    choice = try_backend("odd", torch.empty(5, 8), limit_s=limit_s)
    assert choice is not None
    assert tuple(size for size, _ in choice.costs) == tuple(size for size in SIZES if size >= 32)


def test_a_large_weight_is_timed_in_part_and_checked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("radixkv.kernels.cpu.gemm_trial._MAX_TIMED_NUMBERS", 700 * 8)
    fast_features = add_timed_backend(monkeypatch, now_s, "fast", 1e-2)
    slow_features = add_timed_backend(monkeypatch, now_s, "slow", 2e-2)
    names = ("slow", "fast")
    choice = choose_gemm(torch.empty(1400, 8), None, names, is_exact=True, clock=lambda: now_s[0])
    assert choice is not None
    assert (choice.backend, dict(choice.costs).keys()) == ("fast", {*SIZES})
    assert set(fast_features) == {512, 700, 1400}
    assert set(slow_features) == {512, 700}
    assert dict(choice.costs)[8] == pytest.approx(2e-2), "twice the time of half of the weight"


@pytest.mark.parametrize(("cache_bytes", "num_copies"), [(1024, 1), (1025, 2), (10 * 1024, 10), (2**40, 32)])
def test_at_most_32_copies_of_a_weight_are_twice_as_large_as_the_cache(
    cache_bytes: int, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[torch.Size] = []  # shapes of the copies

    def pack(weight: torch.Tensor) -> torch.Tensor:
        packed.append(weight.shape)
        return weight

    monkeypatch.setitem(GEMM_BACKENDS, "plain", GEMM_BACKENDS["plain"]._replace(pack=pack))
    monkeypatch.setattr("radixkv.kernels.cpu.gemm_trial._cache_bytes", lambda: cache_bytes)
    calls = cold_calls("plain", torch.empty(64, 8), None)  # a weight of 2,048 bytes
    assert packed == [], "a copy is made when it is needed"
    assert len({id(next(calls)) for _ in range(100)}) == num_copies
    assert len(packed) == num_copies


@pytest.mark.parametrize(("text", "expected"), [("32768K\n", 2**25), ("much", 2**27), (None, 2**27)])
def test_the_cache_size_is_read_from_the_system(
    text: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "size").write_text(text, encoding="ascii")
    monkeypatch.setattr("radixkv.kernels.cpu.gemm_trial._CACHE_SIZE", tmp_path / "size")
    assert _cache_bytes.__wrapped__() == expected
