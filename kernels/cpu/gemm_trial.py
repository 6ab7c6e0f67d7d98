"""Autotunes the GEMM backend for one weight: which is fastest, and for which row counts it is batch-invariant.

The order in which a library adds up terms does not depend on the values, so the cancellation-sensitive inputs of
`sensitive_linear` reveal it. Every row count that is used later is checked, with rows at the start, at the end, and in
another order.

A trial may have a time limit, which may reduce the row counts that are timed and checked. In exact mode, a library that
is not batch-invariant by construction is still called only with row counts that gave bitwise identical results with the
whole weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, aligned_rows
from radixkv.kernels.cpu.row_tiles import SIZES, RowTiles, in_tiles
from radixkv.kernels.cpu.stopwatch import Call, Stopwatch

# Row counts that the score is computed from: decode of one request, batched decode, a short suffix and a long one.
_SCORED_ROWS = (1, 8, 64, 512)

# The weights of a model are read from memory, not from a cache. So calls cycle through copies of the weight that
# together are this many times as large as the cache. With a single copy of 35 MB, MKL appeared twice as fast for 16
# rows as it was in a model.
_COPIES_TO_CACHE_RATIO = 2
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_CACHE_BYTES = 128 * 2**20  # if the system does not report it
_MAX_COPIES = 32
# Positions of rows at which results are compared: the start, the end, and another order.
_NUM_POSITIONS = 3

# Row counts that are checked if there is no time for all: they take 1/4, 1/20 and 1/150 of the time. Other row counts
# are padded, and larger ones take several calls: with calls of 8 rows only, a long prompt is slow.
_SELECTIONS = ((1, 4, 16, 64, 256), (1, 8, 64), (1, 8))

# Each set of row counts with identical results needs a row count of at least this: computing all rows in calls with
# fewer takes too long.
_MIN_SET_ROWS = 8

# Larger weights are timed with their first features only. A weight of 640 by 262,144 is 20 times as large: with all of
# it, a trial took 24 s.
_MAX_TIMED_NUMBERS = 2**23

# A backend that takes more than this many times as long as the fastest one with a part of the weight is dropped at
# once. Without hardware support, a convolution in bfloat16 to more than 256 features takes 150 times as long.
_MAX_SLOWDOWN = 8.0
_NUM_PART_FEATURES = 512  # features, in and out

# For a row count not yet timed, a backend is assumed to be at most this many times as fast as the leader.
_MAX_RELATIVE_SPEED = 1.5

# A batch-invariant backend may take this much longer than the fastest other one: it needs no padding, a layer whose
# matmuls are all batch-invariant runs in one call, and timings on a busy machine are off by as much.
HEAD_START = 1.5


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The GEMM backend for weights of one shape.

    Attributes:
        backend: a name in `GEMM_BACKENDS`.
        costs: pairs of a row count and the seconds of a call with it, for the row counts that give bitwise identical
            results. Empty if any row count is allowed: the backend is batch-invariant, or it need not be.
    """

    backend: str
    costs: tuple[tuple[int, float], ...] = ()


def choose_gemm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backends: Sequence[str],
    *,
    is_exact: bool,
    max_rows: int = SIZES[-1],
    limit_s: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> GemmChoice | None:
    """Choose the fastest backend for weights of this shape, dtype and strides.

    On a busy machine, timings are unreliable: a batch-invariant backend is then chosen, if there is a candidate.

    Batch-invariant backends are timed first, then the others in the order of `backends`. At the time limit, the fastest
    of those that were timed is chosen; without any time, the first one. In exact mode, a backend that is not
    batch-invariant is only called with row counts that gave bitwise identical results. If no candidate is
    batch-invariant, half of the time is reserved for these checks; with less time fewer row counts are checked, at
    least 1 and 8.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
        backends: names of candidates.
        is_exact: whether only row counts with bitwise identical results may be used.
        max_rows: maximum rows per call.
        limit_s: seconds after which nothing more is timed. Checks may take longer.
        clock: returns seconds; None for the clock of `Stopwatch.here`.

    Returns:
        The choice; None in exact mode if no candidate is batch-invariant for any row count. That does not depend on
        the limit.
    """
    watch = Stopwatch.here() if clock is None else Stopwatch(clock)
    end_s = watch.now() + limit_s

    def left_s() -> float:
        return end_s - watch.now()

    sizes = tuple(size for size in SIZES if size <= max_rows)
    num_timed = max(_NUM_PART_FEATURES, _MAX_TIMED_NUMBERS // weight.shape[1])
    rows, part, part_bias = sensitive_linear(weight[:num_timed], None if bias is None else bias[:num_timed], sizes[-1])
    scored_rows = [min(num_rows, sizes[-1]) for num_rows in _SCORED_ROWS]
    names = _without_slow(backends, rows[:2], part, part_bias, watch)
    batch_invariant = next((each for each in backends if GEMM_BACKENDS[each].is_batch_invariant), None)
    candidates = [_RankedBackend(names[0])]
    if len(names) > 1:
        reserved_s = limit_s / 2 if is_exact and batch_invariant is None and limit_s < math.inf else 0.0
        candidates = _time_in_turn(names, rows, part, part_bias, scored_rows, watch, lambda: left_s() - reserved_s)
    if watch.is_busy and batch_invariant is not None:
        return GemmChoice(batch_invariant)
    if not is_exact:
        return GemmChoice(candidates[0].name)
    whole = rows, part, part_bias
    if len(part) < len(weight):
        for candidate in candidates:
            candidate.scale(len(weight) / len(part))
        if not GEMM_BACKENDS[candidates[0].name].is_batch_invariant:  # or it is chosen without a check
            whole = sensitive_linear(weight, bias, sizes[-1])
    best = _fastest_exact(candidates, whole, sizes, scored_rows, watch, left_s)
    if best is None and limit_s < math.inf:  # larger row counts, for which there was no time, may agree
        best = _fastest_exact(candidates, whole, sizes, scored_rows, watch, lambda: math.inf)
    return best


@dataclass(slots=True, eq=False)
class _RankedBackend:
    """A backend and its times.

    Attributes:
        name: name of the backend.
        calls: matmuls with the copies of the weight, in turn; None while there are none.
        known: measured seconds per call, by row count.
        costs: seconds per call, by row count; estimates for row counts that were not timed.
        score: score of the costs; lower is better. If the backend was dropped early, its best possible score; infinite
            if it was not timed.
    """

    name: str
    calls: Iterator[Call] | None = None
    known: dict[int, float] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    score: float = math.inf

    def scale(self, factor: float) -> None:
        """Extrapolate times with a part of a weight to the whole weight."""
        self.calls = None
        self.known = {num_rows: factor * cost_s for num_rows, cost_s in self.known.items()}
        self.score += len(_SCORED_ROWS) * math.log(factor)


def _without_slow(
    names: Sequence[str],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    watch: Stopwatch,
) -> list[str]:
    """Return the backends that are not far slower than the fastest one with the first features of a weight."""
    if len(names) == 1:
        return list(names)
    part, part_bias = (
        weight[:_NUM_PART_FEATURES, :_NUM_PART_FEATURES],
        None if bias is None else bias[:_NUM_PART_FEATURES],
    )
    rows = rows[:, :_NUM_PART_FEATURES]
    times = {name: watch.shortest(itertools.repeat(_pack(name, part, part_bias)), aligned_rows(rows)) for name in names}
    return [name for name in names if times[name] <= _MAX_SLOWDOWN * min(times.values())]


def _time_in_turn(
    names: Sequence[str],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scored_rows: Sequence[int],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> list[_RankedBackend]:
    """Time backends one after the other. A backend that can't catch up with the leader is dropped early.

    Returns:
        All of them, the fastest first, and those that were not timed last.
    """
    candidates = [
        _RankedBackend(name) for name in sorted(names, key=lambda name: not GEMM_BACKENDS[name].is_batch_invariant)
    ]
    first: _RankedBackend | None = None
    for candidate in candidates:
        if left_s() <= 0:
            break
        candidate.calls = cold_calls(candidate.name, weight, bias)
        allowance = HEAD_START if GEMM_BACKENDS[candidate.name].is_batch_invariant else 1.0
        # Optimistic estimates for the row counts that are not timed yet.
        costs = (
            {}
            if first is None
            else {num_rows: cost_s / _MAX_RELATIVE_SPEED for num_rows, cost_s in first.costs.items()}
        )
        for num_rows in dict.fromkeys(scored_rows):
            # Small row counts are always timed: the costs of the others are extrapolated from them.
            if num_rows > _MIN_SET_ROWS and 2 * (expected_s := _expected_s(candidate.known, num_rows)) > left_s():
                costs[num_rows] = expected_s
            else:
                costs[num_rows] = candidate.known[num_rows] = watch.shortest(
                    candidate.calls, aligned_rows(rows[:num_rows])
                )
            if first is not None and _score([costs[each] / allowance for each in scored_rows]) >= first.score:
                break
        candidate.costs, candidate.score = costs, _score([costs[each] / allowance for each in scored_rows])
        behind = candidate
        if first is None or candidate.score < first.score:
            first, behind = candidate, first or candidate
        if behind is not first:
            behind.calls = None  # free its weights; they are packed again in the rare case that they are needed
    ranked = sorted(candidates, key=lambda candidate: candidate.score)
    _confirm(ranked, rows, weight, bias, scored_rows, watch, left_s)
    return sorted(ranked, key=lambda candidate: candidate.score)


def _confirm(
    ranked: Sequence[_RankedBackend],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scored_rows: Sequence[int],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> None:
    """If the leader is not batch-invariant, time it again, alternating with the fastest batch-invariant backend.

    The leader keeps the lead only if its score, with the slower one of its two times for each row count, beats that of
    the other backend with the faster ones, since a disturbance of the machine rarely affects both measurements. If no
    time is left for this, it does not keep the lead. A wrong leader costs a model
    more than a right one gains, because the layer no longer runs in one call: decoding a token with `tiny` took 6.3 ms
    instead of 3.6 ms.
    """
    leader = ranked[0]
    batch_invariant = next(
        (each for each in ranked if GEMM_BACKENDS[each.name].is_batch_invariant and each.score < math.inf), None
    )
    if batch_invariant is None or batch_invariant is leader:
        return
    if left_s() <= 0:
        leader.score = math.inf
        return
    calls = {each: each.calls or cold_calls(each.name, weight, bias) for each in (leader, batch_invariant)}
    for num_rows in dict.fromkeys(scored_rows):
        aligned = aligned_rows(rows[:num_rows])
        again_s = {each: watch.shortest(own, aligned) for each, own in calls.items()}
        leader.costs[num_rows] = max(leader.costs[num_rows], again_s[leader])
        batch_invariant.costs[num_rows] = min(batch_invariant.costs[num_rows], again_s[batch_invariant])
    leader.score = _score([leader.costs[each] for each in scored_rows])
    batch_invariant.score = _score([batch_invariant.costs[each] / HEAD_START for each in scored_rows])


def _fastest_exact(
    candidates: Sequence[_RankedBackend],
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    sizes: Sequence[int],
    scored_rows: Sequence[int],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> GemmChoice | None:
    """Choose the fastest backend, with row counts that give bitwise identical results.

    Args:
        candidates: backends, the fastest first.
        whole: rows, weight and bias of the checks.
        sizes: row counts, in ascending order.
        scored_rows: row counts that the score is computed from.
        watch: times calls.
        left_s: returns the seconds that are left.

    Returns:
        The choice; None if no backend is batch-invariant for any of the row counts that there was time to check.
    """
    rows, weight, bias = whole
    best: GemmChoice | None = None
    best_score = math.inf
    for candidate in candidates:
        if best is not None and (candidate.score >= best_score or left_s() <= 0):
            break  # restricting the row counts does not make a backend faster
        if GEMM_BACKENDS[candidate.name].is_batch_invariant:
            best_score, best = candidate.score, GemmChoice(candidate.name)
            continue
        calls = candidate.calls or cold_calls(candidate.name, weight, bias)
        affordable = _affordable(sizes, calls, rows, candidate.known, watch, left_s)
        for costs in _agreeing_sets(calls, rows, affordable, candidate.known, watch):
            score = _score([RowTiles(costs).cost(num_rows) for num_rows in scored_rows])
            if score < best_score:
                best_score, best = score, GemmChoice(candidate.name, tuple(sorted(costs.items())))
    return best


def cold_calls(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[Call]:
    """Cycle through matmuls with the copies of `cold_copies`, without end. Each copy is packed when first needed."""
    copies: list[Call] = []
    for index in range(_num_copies(weight)):
        copies.append(_pack(name, weight if not index else weight.clone(), bias))
        yield copies[-1]
    yield from itertools.cycle(copies)


def cold_copies(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Call]:
    """Pack as many copies of a weight as it takes to be twice as large as the cache, but at most 32.

    Args:
        name: name of the backend.
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.

    Returns:
        The matmul with each copy: a function of rows `[num_rows, in_features]`.
    """
    return list(itertools.islice(cold_calls(name, weight, bias), _num_copies(weight)))


def _num_copies(weight: torch.Tensor) -> int:
    weight_bytes = max(1, weight.numel() * weight.element_size())
    return min(_MAX_COPIES, -(-_COPIES_TO_CACHE_RATIO * _cache_bytes() // weight_bytes))


@cache
def _cache_bytes() -> int:
    """Size of the processor's last-level cache."""
    try:
        return int(_CACHE_SIZE.read_text(encoding="ascii").strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _CACHE_BYTES


def _pack(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Call:
    """Pack a weight. Returns the matmul with it."""
    backend = GEMM_BACKENDS[name]
    packed = backend.pack(weight)
    return lambda rows: backend.multiply(rows, packed, bias)


def _score(times: Sequence[float]) -> float:
    """Sum the logarithms of times: lower is better, and a speedup counts the same for few rows as for many."""
    return sum(math.log(max(each, 1e-9)) for each in times)


def _affordable(
    sizes: Sequence[int],
    calls: Iterator[Call],
    rows: torch.Tensor,
    known: Mapping[int, float],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> tuple[int, ...]:
    """Return the row counts that there is time to check: all of them, or one of `_SELECTIONS`.

    Args:
        sizes: row counts, in ascending order.
        calls: matmuls with the weight.
        rows: input rows.
        known: measured costs of some row counts.
        watch: times the calls whose costs are not known.
        left_s: returns the seconds that are left.
    """
    few = tuple(size for size in sizes if size <= _MIN_SET_ROWS)
    costs = dict(known)
    for size in {few[0], few[-1]} - known.keys():
        costs[size] = watch.shortest(calls, aligned_rows(rows[:size]))
    time_s = left_s()
    for selection in (sizes, *_SELECTIONS):
        selected = tuple(size for size in sizes if size in selection)
        if sum(_NUM_POSITIONS * _expected_s(costs, size) for size in selected) <= time_s:
            break
    return selected


def _expected_s(costs: Mapping[int, float], num_rows: int) -> float:
    """Extrapolate the cost of a row count linearly from the costs of small ones."""
    few, more = min(costs), max(size for size in costs if size <= _MIN_SET_ROWS)
    row_s = max(0.0, costs[more] - costs[few]) / max(1, more - few)
    return costs[few] + (num_rows - few) * row_s


def _agreeing_sets(
    calls: Iterator[Call],
    rows: torch.Tensor,
    sizes: Sequence[int],
    known: Mapping[int, float],
    watch: Stopwatch,
) -> list[dict[int, float]]:
    """Group row counts into disjoint sets that give bitwise identical results. Some row counts may be in no set.

    Returns the cost of each row count of each set.

    Args:
        known: measured costs of some row counts.
    """
    rows = rows[: sizes[-1]]
    order = torch.randperm(sizes[-1], generator=torch.Generator().manual_seed(0))
    sets: list[tuple[torch.Tensor, dict[int, float]]] = []  # result for all rows, costs
    for size in reversed(sizes):
        positions: list[slice | torch.Tensor] = [slice(-size, None), order[:size]]
        if size < sizes[-1]:
            positions.append(slice(size))
        results, times = [], []
        for position in positions:
            result, took = watch.time(next(calls), aligned_rows(rows[position]))
            results.append(result)
            times.append(took)

        def agrees(
            expected: torch.Tensor,
            results: Sequence[torch.Tensor] = tuple(results),
            positions: Sequence[slice | torch.Tensor] = tuple(positions),
        ) -> bool:
            return all(
                torch.equal(result, expected[position]) for result, position in zip(results, positions, strict=True)
            )

        costs = next((costs for expected, costs in sets if agrees(expected)), None)
        if costs is None:
            if size < min(_MIN_SET_ROWS, sizes[-1]):
                continue
            whole = results[0] if size == sizes[-1] else in_tiles(next(calls), rows, RowTiles({size: 1.0}))
            if not agrees(whole):
                continue
            costs = {}
            sets.append((whole, costs))
        costs[size] = known[size] if size in known else watch.shortest(calls, aligned_rows(rows[:size]), times)
    return [costs for _, costs in sets]
