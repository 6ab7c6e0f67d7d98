"""Tries products of rows with a weight by several libraries: which is fast, and which numbers of rows give equal bits.

The order in which a library adds up a row does not depend on the numbers, so the numbers of `cancelling_product` show
it: every number of rows that is used later is tried, with rows at the beginning, at the end, and in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from radixkv.kernels.linear_packings import PACKINGS, aligned_rows
from radixkv.kernels.row_tiles import SIZES, RowTiles, in_tiles
from radixkv.kernels.stopwatch import Call, Stopwatch
from radixkv.kernels.sum_order import cancelling_product

# Numbers of rows whose times are weighed: decoding alone, decoding together, a short suffix and a long one.
_WEIGHED = (1, 8, 64, 512)

# Weights of a model come from memory, not from a cache: calls read copies in turn, which together have this many times
# the cache's bytes. With one copy of 35 MB MKL looked twice as fast for 16 rows as it was in a model.
_COLD = 2
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_CACHE_BYTES = 128 * 2**20  # where the machine does not tell
_MOST_COPIES = 32

# Fewer rows than these can't begin a set of numbers that agree: to compute all rows by them takes too long.
_FEWEST_TO_BEGIN = 8

# A packing whose calls with a part of the weight take this many times the fastest one's is dropped at once. Without the
# instructions for it, a convolution in bfloat16 to more than 256 features takes 150 times as long.
_HOPELESS = 8.0
_PART = 512  # features, in and out

# A packing that is behind is not expected to be this many times as fast as the first one for any other number of rows.
_CATCHING_UP = 1.5

# A packing whose rows are alike may take this much longer than the fastest other one: no rows are filled up for it, a
# layer all of whose products are such runs in one call, and a trial on a busy machine is off by as much.
LEAD = 1.5


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The way to compute products with weights of one shape.

    Attributes:
        packing: a name of `PACKINGS`.
        costs: number of rows of a call and what it took, in seconds: numbers whose rows have equal bits. Empty: any
            number will do, since all rows are alike or may differ.
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

    While the machine has other work that is not known, and one whose rows are alike is chosen, if it is among them.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
        packings: names of candidates.
        is_exact: whether only numbers of rows with equal bits may be used.
        most_rows: rows of a call at most.
        clock: seconds; None for those of `Stopwatch.here`.

    Returns:
        The choice; None if no candidate treats rows alike.
    """
    watch = Stopwatch.here() if clock is None else Stopwatch(clock)
    sizes = tuple(size for size in SIZES if size <= most_rows)
    rows, cancelling, small = cancelling_product(weight, bias, sizes[-1])
    weighed = [min(num_rows, sizes[-1]) for num_rows in _WEIGHED]
    hopeful = _hopeful(packings, rows[:2], cancelling, small, watch)
    entrants = sorted(_race(hopeful, rows, cancelling, small, weighed, watch), key=lambda entrant: entrant.score)
    steady = next((each for each in packings if PACKINGS[each].rows_are_alike), None)
    if watch.is_busy and steady is not None:
        return ProductChoice(steady)
    if not is_exact:
        return ProductChoice(entrants[0].name)
    best: ProductChoice | None = None
    best_score = math.inf
    for entrant in entrants:
        if entrant.score >= best_score:
            break  # where it may be called with some numbers of rows only, it hardly gets faster
        if PACKINGS[entrant.name].rows_are_alike:
            best_score, best = entrant.score, ProductChoice(entrant.name)
            continue
        calls = entrant.calls or cold_copies(entrant.name, cancelling, small)
        for costs in _agreeing(calls, rows, sizes, entrant.known, watch):
            score = _score([RowTiles(costs).cost(num_rows) for num_rows in weighed])
            if score < best_score:
                best_score, best = score, ProductChoice(entrant.name, tuple(sorted(costs.items())))
    return best


@dataclass(slots=True)
class _Entrant:
    """A packing that is timed.

    Attributes:
        name: of the packing.
        calls: products with copies of the weight, while it is in front.
        known: what numbers of rows cost, in seconds.
        score: of these costs. Where it gave up, the best that it might have reached.
    """

    name: str
    calls: list[Call]
    known: dict[int, float] = field(default_factory=dict)
    score: float = math.inf


def _hopeful(
    names: Sequence[str],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    watch: Stopwatch,
) -> list[str]:
    """Return the names of packings that are not slower by far with the first features of a weight."""
    part, part_bias = weight[:_PART, :_PART], None if bias is None else bias[:_PART]
    rows = rows[:, :_PART]
    times = {
        name: watch.shortest(itertools.repeat(_packed(name, part, part_bias)), aligned_rows(rows)) for name in names
    }
    return [name for name in names if times[name] <= _HOPELESS * min(times.values())]


def _race(
    names: Sequence[str],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weighed: Sequence[int],
    watch: Stopwatch,
) -> list[_Entrant]:
    """Time packings one after the other. One that is too far behind the first gives up."""
    entrants: list[_Entrant] = []
    first: _Entrant | None = None
    for name in names:
        entrant = _Entrant(name, cold_copies(name, weight, bias))
        entrants.append(entrant)
        turns, lead = itertools.cycle(entrant.calls), LEAD if PACKINGS[name].rows_are_alike else 1.0
        # What it has not tried yet is as fast as it could be.
        costs = {} if first is None else {num_rows: cost_s / _CATCHING_UP for num_rows, cost_s in first.known.items()}
        for num_rows in dict.fromkeys(weighed):
            costs[num_rows] = entrant.known[num_rows] = watch.shortest(turns, aligned_rows(rows[:num_rows]))
            if first is not None and _score([costs[each] / lead for each in weighed]) >= first.score:
                break
        entrant.score = _score([costs[each] / lead for each in weighed])
        if first is None or entrant.score < first.score:
            first, entrant = entrant, first or entrant
        if entrant is not first:
            entrant.calls = []  # it is packed again in the rare case that it is needed
    return entrants


def cold_copies(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Call]:
    """Lay out a weight as often as it takes to fill more than the cache.

    Args:
        name: of the packing.
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.

    Returns:
        The product with each copy: a function of rows `[num_rows, in_features]`.
    """
    weight_bytes = max(1, weight.numel() * weight.element_size())
    num_copies = min(_MOST_COPIES, -(-_COLD * _cache_bytes() // weight_bytes))
    return [_packed(name, weight if not index else weight.clone(), bias) for index in range(num_copies)]


@cache
def _cache_bytes() -> int:
    """The size of the processor's last cache."""
    try:
        return int(_CACHE_SIZE.read_text(encoding="ascii").strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _CACHE_BYTES


def _packed(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Call:
    """Lay out a weight. Returns its product."""
    packing = PACKINGS[name]
    packed = packing.pack(weight)
    return lambda rows: packing.multiply(rows, packed, bias)


def _score(times: Sequence[float]) -> float:
    """The smaller the better: twice as fast counts the same for few rows and for many."""
    return sum(math.log(max(each, 1e-9)) for each in times)


def _agreeing(
    calls: Sequence[Call],
    rows: torch.Tensor,
    sizes: Sequence[int],
    known: Mapping[int, float],
    watch: Stopwatch,
) -> list[dict[int, float]]:
    """Sort numbers of rows into sets whose rows have equal bits. Returns what a call with each number costs.

    Args:
        known: what some numbers cost.
    """
    turns = itertools.cycle(calls)
    order = torch.randperm(sizes[-1], generator=torch.Generator().manual_seed(0))
    sets: list[tuple[torch.Tensor, dict[int, float]]] = []  # what all rows give, and costs
    for size in reversed(sizes):
        places: list[slice | torch.Tensor] = [slice(-size, None), order[:size]]
        if size < sizes[-1]:
            places.append(slice(size))
        answers, times = [], []
        for place in places:
            answer, took = watch.time(next(turns), aligned_rows(rows[place]))
            answers.append(answer)
            times.append(took)

        def agrees(
            expected: torch.Tensor,
            answers: Sequence[torch.Tensor] = tuple(answers),
            places: Sequence[slice | torch.Tensor] = tuple(places),
        ) -> bool:
            return all(torch.equal(answer, expected[place]) for answer, place in zip(answers, places, strict=True))

        costs = next((costs for expected, costs in sets if agrees(expected)), None)
        if costs is None:
            if size < min(_FEWEST_TO_BEGIN, sizes[-1]):
                continue
            whole = answers[0] if size == sizes[-1] else in_tiles(calls[0], rows, RowTiles({size: 1.0}))
            if not agrees(whole):
                continue
            costs = {}
            sets.append((whole, costs))
        costs[size] = known[size] if size in known else watch.shortest(turns, aligned_rows(rows[:size]), times)
    return [costs for _, costs in sets]
