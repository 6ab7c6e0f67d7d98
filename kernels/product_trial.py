"""Tries products of rows with a weight by several libraries: which is fast, and which numbers of rows give equal bits.

The order in which a library adds up a row does not depend on the numbers, so the numbers of `cancelling_product` show
it: every number of rows that is used later is tried, with rows at the beginning, at the end, and in another order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from radixkv.kernels.linear_packings import PACKINGS, aligned_rows
from radixkv.kernels.row_tiles import SIZES, RowTiles, in_tiles
from radixkv.kernels.sum_order import cancelling_product

# Numbers of rows whose times are weighed: decoding alone, decoding together, a short suffix and a long one.
_WEIGHED = (1, 8, 64, 512)

# Weights of a model come from memory, not from a cache: few rows are timed with copies of this size in turn. With one
# copy of 35 MB MKL looked twice as fast for 16 rows as it was in a model.
_COLD_BYTES = 256 * 2**20
_FEWEST_COPIES, _MOST_COPIES = 2, 32
_COLD_ROWS = 256  # more rows reuse a weight for longer than it takes to read
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 20
_LEAST_S = 2e-3  # of all rounds together: shorter ones are lost in what else the machine does
# Of a round, after which it leaves copies out: to read the weight is then a small part of a call, or enough was read.
_ENOUGH_S = 20e-3

# Fewer rows than these can't begin a set of numbers that agree: to compute all rows by them takes too long.
_FEWEST_TO_BEGIN = 8

# A packing whose calls take this many times the fastest one's is dropped at once.
_HOPELESS = 8.0

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The way to compute products with weights of one shape.

    Attributes:
        packing: a name of `PACKINGS`.
        costs: number of rows of a call and what it took, in seconds: numbers whose rows have equal bits. Empty: rows
            may differ, so any number will do.
    """

    packing: str
    costs: tuple[tuple[int, float], ...] = ()


def choose_product(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packings: Sequence[str],
    *,
    is_exact: bool,
    most_rows: int = SIZES[-1],
    clock: Callable[[], float] | None = None,
) -> ProductChoice | None:
    """Choose the fastest packing for weights of this shape, dtype and strides.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
        packings: names of candidates.
        is_exact: whether only numbers of rows with equal bits may be used.
        most_rows: rows of a call at most.
        clock: seconds; None takes the thread's own time where there is one thread, since nothing else adds to it.

    Returns:
        The choice; None if no candidate treats rows alike.
    """
    if clock is None:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sizes = tuple(size for size in SIZES if size <= most_rows)
    rows, cancelling, small = cancelling_product(weight, bias, sizes[-1])
    weight_bytes = max(1, weight.numel() * weight.element_size())
    num_copies = max(_FEWEST_COPIES, min(_MOST_COPIES, _COLD_BYTES // weight_bytes))
    weighed = [min(num_rows, sizes[-1]) for num_rows in _WEIGHED]

    best: ProductChoice | None = None
    best_score, fastest_s = math.inf, math.inf
    for name in packings:
        calls = [_packed(name, cancelling, small)]
        few_s = _time(calls, rows[:2], clock)
        if few_s > _HOPELESS * fastest_s:
            continue
        fastest_s = min(fastest_s, few_s)
        calls += [_packed(name, cancelling, small) for _ in range(num_copies - 1)]
        known = {num_rows: _time(calls, rows[:num_rows], clock) for num_rows in weighed}
        score = _score([known[num_rows] for num_rows in weighed])
        if score >= best_score:
            continue  # where it may be called with some numbers of rows only, it hardly gets faster
        if not is_exact:
            best_score, best = score, ProductChoice(name)
            continue
        for costs in _agreeing(calls, rows, sizes, known, clock):
            score = _score([RowTiles(costs).cost(num_rows) for num_rows in weighed])
            if score < best_score:
                best_score, best = score, ProductChoice(name, tuple(sorted(costs.items())))
    return best


def _packed(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """Lay out a copy of a weight. Returns its product."""
    packing = PACKINGS[name]
    packed = packing.pack(weight.clone())
    return lambda rows: packing.multiply(rows, packed, bias)


def _score(times: Sequence[float]) -> float:
    """The smaller the better: twice as fast counts the same for few rows and for many."""
    return sum(math.log(max(each, 1e-9)) for each in times)


def _agreeing(
    calls: Sequence[Multiply],
    rows: torch.Tensor,
    sizes: Sequence[int],
    known: Mapping[int, float],
    clock: Callable[[], float],
) -> list[dict[int, float]]:
    """Sort numbers of rows into sets whose rows have equal bits. Returns what a call with each number costs.

    Args:
        known: what some numbers cost.
    """
    multiply = calls[0]
    order = torch.randperm(sizes[-1], generator=torch.Generator().manual_seed(0))
    shuffled = rows[order]
    sets: list[tuple[torch.Tensor, dict[int, float]]] = []  # what all rows give, and costs
    for size in reversed(sizes):
        placed = (rows[:size], rows[-size:], shuffled[:size])
        answers, times = [], []
        for some in map(aligned_rows, placed):
            start_s = clock()
            answers.append(multiply(some))
            times.append(clock() - start_s)

        def agrees(expected: torch.Tensor, size: int = size, answers: Sequence[torch.Tensor] = tuple(answers)) -> bool:
            places = (expected[:size], expected[-size:], expected[order[:size]])
            return all(torch.equal(answer, place) for answer, place in zip(answers, places, strict=True))

        costs = next((costs for expected, costs in sets if agrees(expected)), None)
        if costs is None:
            if size < min(_FEWEST_TO_BEGIN, sizes[-1]):
                continue
            whole = in_tiles(multiply, rows, RowTiles({size: 1.0}))
            if not agrees(whole):
                continue
            costs = {}
            sets.append((whole, costs))
        if size in known:
            costs[size] = known[size]
        else:
            costs[size] = min(times[1:]) if size > _COLD_ROWS else _time(calls, rows[:size], clock)
    return [costs for _, costs in sets]


def _time(calls: Sequence[Multiply], rows: torch.Tensor, clock: Callable[[], float]) -> float:
    """Seconds of a call, the first one apart. The shortest of some rounds: other programs only add to it."""
    rows = aligned_rows(rows)
    used = calls if rows.shape[0] <= _COLD_ROWS else calls[:1]
    used[0](rows)
    rounds: list[float] = []
    means: list[float] = []
    while len(rounds) < _FEWEST_ROUNDS or (sum(rounds) < _LEAST_S and len(rounds) < _MOST_ROUNDS):
        took_s, num_calls = _round(used, rows, clock)
        rounds.append(took_s)
        means.append(took_s / num_calls)
    return min(means)


def _round(calls: Sequence[Multiply], rows: torch.Tensor, clock: Callable[[], float]) -> tuple[float, int]:
    """Make calls in turn until that took long enough. Returns the seconds, and the number of calls."""
    start_s = end_s = clock()
    for num_calls, call in enumerate(calls, start=1):
        call(rows)
        end_s = clock()
        if end_s - start_s >= _ENOUGH_S and num_calls >= _FEWEST_COPIES:
            return end_s - start_s, num_calls
    return end_s - start_s, len(calls)
