"""Compares GEMM backends for one weight: which is fastest, and for which numbers of rows the bits of a row agree.

The order in which a library sums does not depend on the values, so the cancellation-sensitive inputs of
`sensitive_linear` reveal it. Every number of rows that is used later is tried, with rows at the beginning, at the end,
and in another order.

A trial may have a time limit. It cuts what is timed, and never what is checked: a library is used with those numbers of
rows alone whose bits were seen to agree, with the whole weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from radixkv.kernels.cancellation import sensitive_linear
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, aligned_rows
from radixkv.kernels.cpu.row_tiles import SIZES, RowTiles, in_tiles
from radixkv.kernels.cpu.stopwatch import Call, Stopwatch

# Numbers of rows whose times are weighed: decoding alone, decoding together, a short suffix and a long one.
_WEIGHED = (1, 8, 64, 512)

# Weights of a model come from memory, not from a cache: calls read copies in turn, which together have this many times
# the cache's bytes. With one copy of 35 MB MKL looked twice as fast for 16 rows as it was in a model.
_COLD = 2
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_CACHE_BYTES = 128 * 2**20  # where the machine does not tell
_MOST_COPIES = 32

# Places of rows at which bits are compared: the beginning, the end, and another order.
_NUM_PLACES = 3

# Numbers of rows that are checked where there is no time for all: they cost a quarter, a 20th and a 150th of that.
# Rows between are filled up, and more rows take several calls: with calls of 8 rows only, a long prompt is slow.
_SELECTIONS = ((1, 4, 16, 64, 256), (1, 8, 64), (1, 8))

# Fewer rows than these can't begin a set of numbers that agree: to compute all rows by them takes too long.
_FEWEST_TO_BEGIN = 8

# Weights with more numbers are timed by their first features. One of 640 by 262,144 has twenty times as many: with all
# of them, a trial took 24 s.
_MAX_TIMED_NUMBERS = 2**23

# A backend whose calls with a part of the weight take this many times the fastest one's is dropped at once. Without the
# instructions for it, a convolution in bfloat16 to more than 256 features takes 150 times as long.
_HOPELESS = 8.0
_PART = 512  # features, in and out

# A backend that is behind is not expected to be this many times as fast as the first one for any other number of rows.
_CATCHING_UP = 1.5

# A backend whose rows are alike may take this much longer than the fastest other one: no rows are filled up for it, a
# layer all of whose products are such runs in one call, and a trial on a busy machine is off by as much.
LEAD = 1.5


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The way to compute products with weights of one shape.

    Attributes:
        backend: a name of `GEMM_BACKENDS`.
        costs: number of rows of a call and what it took, in seconds: numbers whose rows have equal bits. Empty: any
            number will do, since all rows are alike or may differ.
    """

    backend: str
    costs: tuple[tuple[int, float], ...] = ()


def choose_gemm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backends: Sequence[str],
    *,
    is_exact: bool,
    most_rows: int = SIZES[-1],
    limit_s: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> GemmChoice | None:
    """Choose the fastest backend for weights of this shape, dtype and strides.

    While the machine has other work that is not known, and one whose rows are alike is chosen, if it is among them.

    Backends whose rows are alike are timed first, then the others in the order of `backends`. When the time limit is
    reached, the fastest of those that were timed is chosen; with no time at all, the first one. A backend whose rows
    are not alike is called only with numbers of rows whose bits were seen to agree. Half of the time is kept for these
    checks; with less time fewer numbers of rows are checked, at least 1 and 8.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
        backends: names of candidates.
        is_exact: whether only numbers of rows with equal bits may be used.
        most_rows: rows of a call at most.
        limit_s: seconds after which nothing more is timed. Checks may take longer.
        clock: seconds; None for those of `Stopwatch.here`.

    Returns:
        The choice; None if no candidate treats rows alike, whatever the limit.
    """
    watch = Stopwatch.here() if clock is None else Stopwatch(clock)
    end_s = watch.now() + limit_s

    def left_s() -> float:
        return end_s - watch.now()

    sizes = tuple(size for size in SIZES if size <= most_rows)
    num_timed = max(_PART, _MAX_TIMED_NUMBERS // weight.shape[1])
    rows, part, part_bias = sensitive_linear(weight[:num_timed], None if bias is None else bias[:num_timed], sizes[-1])
    weighed = [min(num_rows, sizes[-1]) for num_rows in _WEIGHED]
    hopeful = _hopeful(backends, rows[:2], part, part_bias, watch)
    steady = next((each for each in backends if GEMM_BACKENDS[each].rows_are_alike), None)
    entrants = [_Entrant(hopeful[0])]
    if len(hopeful) > 1:
        kept_s = limit_s / 2 if is_exact and steady is None and limit_s < math.inf else 0.0
        entrants = _race(hopeful, rows, part, part_bias, weighed, watch, lambda: left_s() - kept_s)
    if watch.is_busy and steady is not None:
        return GemmChoice(steady)
    if not is_exact:
        return GemmChoice(entrants[0].name)
    whole = rows, part, part_bias
    if len(part) < len(weight):
        for entrant in entrants:
            entrant.scale(len(weight) / len(part))
        if not GEMM_BACKENDS[entrants[0].name].rows_are_alike:  # or it is chosen without a check
            whole = sensitive_linear(weight, bias, sizes[-1])
    best = _fastest_exact(entrants, whole, sizes, weighed, watch, left_s)
    if best is None and limit_s < math.inf:  # bits may agree for larger numbers of rows than there was time for
        best = _fastest_exact(entrants, whole, sizes, weighed, watch, lambda: math.inf)
    return best


@dataclass(slots=True, eq=False)
class _Entrant:
    """A backend that is timed.

    Attributes:
        name: of the backend.
        calls: products with copies of the weight, in turn, while it is in front.
        known: what numbers of rows cost, in seconds.
        costs: the same, and what the numbers that were not timed are expected to cost.
        score: of the costs. Where it gave up, the best that it might have reached; infinite if it was not timed.
    """

    name: str
    calls: Iterator[Call] | None = None
    known: dict[int, float] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    score: float = math.inf

    def scale(self, factor: float) -> None:
        """Turn what was timed with a part of a weight into what the whole one is expected to take."""
        self.calls = None
        self.known = {num_rows: factor * cost_s for num_rows, cost_s in self.known.items()}
        self.score += len(_WEIGHED) * math.log(factor)


def _hopeful(
    names: Sequence[str],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    watch: Stopwatch,
) -> list[str]:
    """Return the names of backends that are not slower by far with the first features of a weight."""
    if len(names) == 1:
        return list(names)
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
    left_s: Callable[[], float],
) -> list[_Entrant]:
    """Time backends one after the other. One that is too far behind the first gives up.

    Returns:
        All of them, the fastest first; those that the time did not suffice for at the end.
    """
    entrants = [_Entrant(name) for name in sorted(names, key=lambda name: not GEMM_BACKENDS[name].rows_are_alike)]
    first: _Entrant | None = None
    for entrant in entrants:
        if left_s() <= 0:
            break
        entrant.calls = cold_calls(entrant.name, weight, bias)
        lead = LEAD if GEMM_BACKENDS[entrant.name].rows_are_alike else 1.0
        # What it has not tried yet is as fast as it could be.
        costs = {} if first is None else {num_rows: cost_s / _CATCHING_UP for num_rows, cost_s in first.costs.items()}
        for num_rows in dict.fromkeys(weighed):
            expected_s = 0.0 if num_rows <= _FEWEST_TO_BEGIN else _expected_s(entrant.known, num_rows)
            if 2 * expected_s > left_s():
                costs[num_rows] = expected_s
            else:
                costs[num_rows] = entrant.known[num_rows] = watch.shortest(entrant.calls, aligned_rows(rows[:num_rows]))
            if first is not None and _score([costs[each] / lead for each in weighed]) >= first.score:
                break
        entrant.costs, entrant.score = costs, _score([costs[each] / lead for each in weighed])
        behind = entrant
        if first is None or entrant.score < first.score:
            first, behind = entrant, first or entrant
        if behind is not first:
            behind.calls = None  # it is packed again in the rare case that it is needed
    ranked = sorted(entrants, key=lambda entrant: entrant.score)
    _confirm(ranked, rows, weight, bias, weighed, watch, left_s)
    return sorted(ranked, key=lambda entrant: entrant.score)


def _confirm(
    ranked: Sequence[_Entrant],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weighed: Sequence[int],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> None:
    """Time a leader whose rows are not alike once more, in turn with the fastest backend whose rows are.

    It keeps its lead only if it has it with the slower of its own times and the faster ones of the other: what
    disturbed the machine during one of them rarely does so twice. A wrong leader costs a model more than a right one
    gains, since the layer no longer runs in one call: decoding a token with `tiny` took 6.3 ms instead of 3.6.
    """
    leader = ranked[0]
    steady = next((each for each in ranked if GEMM_BACKENDS[each.name].rows_are_alike and each.score < math.inf), None)
    if steady is None or steady is leader:
        return
    if left_s() <= 0:
        leader.score = math.inf
        return
    calls = {each: each.calls or cold_calls(each.name, weight, bias) for each in (leader, steady)}
    for num_rows in dict.fromkeys(weighed):
        aligned = aligned_rows(rows[:num_rows])
        again_s = {each: watch.shortest(own, aligned) for each, own in calls.items()}
        leader.costs[num_rows] = max(leader.costs[num_rows], again_s[leader])
        steady.costs[num_rows] = min(steady.costs[num_rows], again_s[steady])
    leader.score = _score([leader.costs[each] for each in weighed])
    steady.score = _score([steady.costs[each] / LEAD for each in weighed])


def _fastest_exact(
    entrants: Sequence[_Entrant],
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    sizes: Sequence[int],
    weighed: Sequence[int],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> GemmChoice | None:
    """Choose the fastest backend with numbers of rows that give equal bits.

    Args:
        entrants: backends, the fastest first.
        whole: rows, weight and bias of the checks.
        sizes: numbers of rows, in ascending order.
        weighed: numbers of rows whose costs count.
        watch: times calls.
        left_s: returns the seconds that are left.

    Returns:
        The choice; None if no backend has equal bits for any of the numbers of rows that there was time to check.
    """
    rows, weight, bias = whole
    best: GemmChoice | None = None
    best_score = math.inf
    for entrant in entrants:
        if best is not None and (entrant.score >= best_score or left_s() <= 0):
            break  # where it may be called with some numbers of rows only, it hardly gets faster
        if GEMM_BACKENDS[entrant.name].rows_are_alike:
            best_score, best = entrant.score, GemmChoice(entrant.name)
            continue
        calls = entrant.calls or cold_calls(entrant.name, weight, bias)
        affordable = _affordable(sizes, calls, rows, entrant.known, watch, left_s)
        for costs in _agreeing(calls, rows, affordable, entrant.known, watch):
            score = _score([RowTiles(costs).cost(num_rows) for num_rows in weighed])
            if score < best_score:
                best_score, best = score, GemmChoice(entrant.name, tuple(sorted(costs.items())))
    return best


def cold_calls(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[Call]:
    """Yield products with the copies of `cold_copies` in turn, for ever. A copy is made when it is first needed."""
    made: list[Call] = []
    for index in range(_num_copies(weight)):
        made.append(_packed(name, weight if not index else weight.clone(), bias))
        yield made[-1]
    yield from itertools.cycle(made)


def cold_copies(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Call]:
    """Lay out a weight as often as it takes to fill more than the cache.

    Args:
        name: of the backend.
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.

    Returns:
        The product with each copy: a function of rows `[num_rows, in_features]`.
    """
    return list(itertools.islice(cold_calls(name, weight, bias), _num_copies(weight)))


def _num_copies(weight: torch.Tensor) -> int:
    weight_bytes = max(1, weight.numel() * weight.element_size())
    return min(_MOST_COPIES, -(-_COLD * _cache_bytes() // weight_bytes))


@cache
def _cache_bytes() -> int:
    """The size of the processor's last cache."""
    try:
        return int(_CACHE_SIZE.read_text(encoding="ascii").strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _CACHE_BYTES


def _packed(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Call:
    """Lay out a weight. Returns its product."""
    backend = GEMM_BACKENDS[name]
    packed = backend.pack(weight)
    return lambda rows: backend.multiply(rows, packed, bias)


def _score(times: Sequence[float]) -> float:
    """The smaller the better: twice as fast counts the same for few rows and for many."""
    return sum(math.log(max(each, 1e-9)) for each in times)


def _affordable(
    sizes: Sequence[int],
    calls: Iterator[Call],
    rows: torch.Tensor,
    known: Mapping[int, float],
    watch: Stopwatch,
    left_s: Callable[[], float],
) -> tuple[int, ...]:
    """Return the numbers of rows that there is time to check: all of them, or those of one of `_SELECTIONS`.

    Args:
        sizes: numbers of rows, in ascending order.
        calls: products with the weight.
        rows: to multiply.
        known: what some numbers cost.
        watch: times the calls whose costs are not known.
        left_s: returns the seconds that are left.
    """
    few = tuple(size for size in sizes if size <= _FEWEST_TO_BEGIN)
    costs = dict(known)
    for size in {few[0], few[-1]} - known.keys():
        costs[size] = watch.shortest(calls, aligned_rows(rows[:size]))
    time_s = left_s()
    for selection in (sizes, *_SELECTIONS):
        selected = tuple(size for size in sizes if size in selection)
        if sum(_NUM_PLACES * _expected_s(costs, size) for size in selected) <= time_s:
            break
    return selected


def _expected_s(costs: Mapping[int, float], num_rows: int) -> float:
    """Estimate the cost of a number of rows on the line through the costs of few rows."""
    few, more = min(costs), max(size for size in costs if size <= _FEWEST_TO_BEGIN)
    row_s = max(0.0, costs[more] - costs[few]) / max(1, more - few)
    return costs[few] + (num_rows - few) * row_s


def _agreeing(
    calls: Iterator[Call],
    rows: torch.Tensor,
    sizes: Sequence[int],
    known: Mapping[int, float],
    watch: Stopwatch,
) -> list[dict[int, float]]:
    """Sort numbers of rows into sets whose rows have equal bits. Returns what a call with each number costs.

    Args:
        known: what some numbers cost.
    """
    rows = rows[: sizes[-1]]
    order = torch.randperm(sizes[-1], generator=torch.Generator().manual_seed(0))
    sets: list[tuple[torch.Tensor, dict[int, float]]] = []  # what all rows give, and costs
    for size in reversed(sizes):
        places: list[slice | torch.Tensor] = [slice(-size, None), order[:size]]
        if size < sizes[-1]:
            places.append(slice(size))
        answers, times = [], []
        for place in places:
            answer, took = watch.time(next(calls), aligned_rows(rows[place]))
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
            whole = answers[0] if size == sizes[-1] else in_tiles(next(calls), rows, RowTiles({size: 1.0}))
            if not agrees(whole):
                continue
            costs = {}
            sets.append((whole, costs))
        costs[size] = known[size] if size in known else watch.shortest(calls, aligned_rows(rows[:size]), times)
    return [costs for _, costs in sets]
