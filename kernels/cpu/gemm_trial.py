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
from radixkv.kernels.cpu.stopwatch import Call, CallTime, Stopwatch

# Row counts that the score is computed from: decode of one request, batched decode, a short suffix and a long one.
_SCORED_ROWS = (1, 8, 64, 512)

# The weights of a model are read from memory, not from a cache. So calls cycle through copies of the weight that
# together are this many times as large as the cache. With a single copy of 35 MB, MKL appeared twice as fast for 16
# rows as it was in a model.
_COPIES_TO_CACHE_RATIO = 2
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_DEFAULT_CACHE_BYTES = 128 * 2**20  # if the system does not report the size
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
_MAX_PART_FEATURES = 512  # input features of this part, and output features

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
    trial = _Trial(weight, bias, max_rows, watch, end_s=watch.now() + limit_s)
    names = trial.without_slow(backends)
    batch_invariant = next((name for name in backends if GEMM_BACKENDS[name].is_batch_invariant), None)
    candidates = [_RankedBackend(names[0])]
    if len(names) > 1:
        reserved_s = limit_s / 2 if is_exact and batch_invariant is None and limit_s < math.inf else 0.0
        candidates = trial.rank(names, reserved_s)
    if watch.is_busy and batch_invariant is not None:
        return GemmChoice(batch_invariant)
    if not is_exact:
        return GemmChoice(candidates[0].name)
    if len(trial.weight) < len(weight):
        for candidate in candidates:
            candidate.scale(len(weight) / len(trial.weight))
        if not candidates[0].is_batch_invariant:  # otherwise it is chosen without a check
            trial.use(weight, bias)
    best = trial.fastest_exact(candidates)
    if best is None and limit_s < math.inf:  # larger row counts, for which there was no time, may agree
        trial.end_s = math.inf
        best = trial.fastest_exact(candidates)
    return best


@dataclass(slots=True, eq=False)
class _RankedBackend:
    """A backend and its times.

    Attributes:
        name: name of the backend.
        calls: matmuls with the copies of the weight, in turn; None while no copy is packed.
        measured_s: measured seconds per call, by row count.
        costs: seconds per call, by row count; estimates for row counts that were not timed.
        score: score of the costs; lower is better. If the backend was dropped early, its best possible score; infinite
            if it was not timed.
    """

    name: str
    calls: Iterator[Call] | None = None
    measured_s: dict[int, float] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    score: float = math.inf

    @property
    def is_batch_invariant(self) -> bool:
        """See `GemmBackend.is_batch_invariant`."""
        return GEMM_BACKENDS[self.name].is_batch_invariant

    @property
    def allowance(self) -> float:
        """The factor by which the backend may be slower than others."""
        return HEAD_START if self.is_batch_invariant else 1.0

    def scale(self, factor: float) -> None:
        """Extrapolate times with a part of a weight to the whole weight."""
        self.calls = None
        self.measured_s = {num_rows: factor * seconds for num_rows, seconds in self.measured_s.items()}
        self.score += len(_SCORED_ROWS) * math.log(factor)


class _Trial:
    """Times and checks backends with one weight.

    Args:
        weight: `[out_features, in_features]`; a large one is timed in part.
        bias: `[out_features]`, or None.
        max_rows: maximum rows per call.
        watch: times calls.
        end_s: the time limit, on the clock of `watch`.

    Attributes:
        rows, weight, bias: cancellation-sensitive inputs, see `use`.
        end_s: the argument `end_s`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int, watch: Stopwatch, end_s: float
    ) -> None:
        self._watch = watch
        self.end_s = end_s
        self._sizes = tuple(size for size in SIZES if size <= max_rows)  # row counts, in ascending order
        self._scored_rows = [min(num_rows, self._sizes[-1]) for num_rows in _SCORED_ROWS]
        num_timed = max(_MAX_PART_FEATURES, _MAX_TIMED_NUMBERS // weight.shape[1])
        self.use(weight[:num_timed], None if bias is None else bias[:num_timed])

    def use(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Time and check matmuls with a weight and a bias of these shapes from now on."""
        self.rows, self.weight, self.bias = sensitive_linear(weight, bias, self._sizes[-1])

    def without_slow(self, names: Sequence[str]) -> list[str]:
        """Return the backends that are not far slower than the fastest one with the first features of the weight."""
        if len(names) == 1:
            return list(names)
        part = self.weight[:_MAX_PART_FEATURES, :_MAX_PART_FEATURES]
        part_bias = None if self.bias is None else self.bias[:_MAX_PART_FEATURES]
        rows = aligned_rows(self.rows[:2, :_MAX_PART_FEATURES])
        times_s = {name: self._watch.shortest_s(itertools.repeat(_pack(name, part, part_bias)), rows) for name in names}
        return [name for name in names if times_s[name] <= _MAX_SLOWDOWN * min(times_s.values())]

    def rank(self, names: Sequence[str], reserved_s: float) -> list[_RankedBackend]:
        """Time backends one after the other. A backend that can't catch up with the leader is dropped early.

        Args:
            names: the backends.
            reserved_s: time before the limit that is kept for checks.

        Returns:
            All of them, the fastest first, and those that were not timed last.
        """
        batch_invariant_first = sorted(names, key=lambda name: not GEMM_BACKENDS[name].is_batch_invariant)
        candidates = [_RankedBackend(name) for name in batch_invariant_first]
        leader: _RankedBackend | None = None
        for candidate in candidates:
            if self._remaining_s(reserved_s) <= 0:
                break
            self._time(candidate, leader, reserved_s)
            previous_leader = leader
            if leader is None or candidate.score < leader.score:
                leader = candidate
            # Free the weights of the slower backend. They are packed again in the rare case that they are needed.
            slower = previous_leader if leader is candidate else candidate
            if slower is not None:
                slower.calls = None
        ranked = sorted(candidates, key=lambda candidate: candidate.score)
        self._confirm(ranked, reserved_s)
        return sorted(ranked, key=lambda candidate: candidate.score)

    def _time(self, candidate: _RankedBackend, leader: _RankedBackend | None, reserved_s: float) -> None:
        """Time a backend until all row counts are timed, or it can't catch up with the leader. Sets its score."""
        candidate.calls = cold_calls(candidate.name, self.weight, self.bias)
        # Optimistic estimates for the row counts that are not timed yet.
        leader_costs = {} if leader is None else leader.costs
        candidate.costs = {num_rows: cost_s / _MAX_RELATIVE_SPEED for num_rows, cost_s in leader_costs.items()}
        for num_rows in dict.fromkeys(self._scored_rows):
            # Small row counts are always timed: the costs of the others are extrapolated from them. Another row count
            # is timed if there is time for two calls.
            is_small = num_rows <= _MIN_SET_ROWS
            if is_small or 2 * _expected_s(candidate.measured_s, num_rows) <= self._remaining_s(reserved_s):
                candidate.measured_s[num_rows] = self._shortest_s(candidate.calls, num_rows)
                candidate.costs[num_rows] = candidate.measured_s[num_rows]
            else:
                candidate.costs[num_rows] = _expected_s(candidate.measured_s, num_rows)
            if leader is not None and self._score(candidate) >= leader.score:
                break
        candidate.score = self._score(candidate)

    def _confirm(self, ranked: Sequence[_RankedBackend], reserved_s: float) -> None:
        """If the leader is not batch-invariant, time it again, alternating with the fastest batch-invariant backend.

        Each of the two then has two times for each row count, since a disturbance of the machine rarely affects both
        measurements. The leader keeps the lead only if its slower times still give a better score than the faster times
        of the batch-invariant backend. If no time is left for this, the leader does not keep the lead. A wrong leader
        costs a model more than a right one gains, because the layer no longer runs in one call: decoding a token with
        `tiny` took 6.3 ms instead of 3.6 ms.
        """
        leader = ranked[0]
        timed = [candidate for candidate in ranked if candidate.score < math.inf]
        batch_invariant = next((each for each in timed if each.is_batch_invariant), None)
        if batch_invariant is None or batch_invariant is leader:
            return
        if self._remaining_s(reserved_s) <= 0:
            leader.score = math.inf
            return
        leader_calls = leader.calls or cold_calls(leader.name, self.weight, self.bias)
        batch_invariant_calls = batch_invariant.calls or cold_calls(batch_invariant.name, self.weight, self.bias)
        for num_rows in dict.fromkeys(self._scored_rows):
            leader.costs[num_rows] = max(leader.costs[num_rows], self._shortest_s(leader_calls, num_rows))
            again_s = self._shortest_s(batch_invariant_calls, num_rows)
            batch_invariant.costs[num_rows] = min(batch_invariant.costs[num_rows], again_s)
        leader.score = self._score(leader)
        batch_invariant.score = self._score(batch_invariant)

    def fastest_exact(self, candidates: Sequence[_RankedBackend]) -> GemmChoice | None:
        """Choose the fastest backend, with row counts that give bitwise identical results.

        Args:
            candidates: backends, the fastest first.

        Returns:
            The choice; None if no backend is batch-invariant for any of the row counts that there was time to check.
        """
        best: GemmChoice | None = None
        best_score = math.inf
        for candidate in candidates:
            if best is not None and (candidate.score >= best_score or self._remaining_s() <= 0):
                break  # restricting the row counts does not make a backend faster
            if candidate.is_batch_invariant:
                best_score, best = candidate.score, GemmChoice(candidate.name)
                continue
            calls = candidate.calls or cold_calls(candidate.name, self.weight, self.bias)
            sizes = self._affordable_sizes(calls, candidate.measured_s)
            for costs in self._agreeing_sets(calls, sizes, candidate.measured_s):
                score = _score([RowTiles(costs).cost(num_rows) for num_rows in self._scored_rows])
                if score < best_score:
                    best_score, best = score, GemmChoice(candidate.name, tuple(sorted(costs.items())))
        return best

    def _affordable_sizes(self, calls: Iterator[Call], measured_s: Mapping[int, float]) -> tuple[int, ...]:
        """Return the row counts that there is time to check: all of them, or one of `_SELECTIONS`.

        Args:
            calls: matmuls with the weight.
            measured_s: measured costs of some row counts.
        """
        small_sizes = tuple(size for size in self._sizes if size <= _MIN_SET_ROWS)
        costs = dict(measured_s)
        for size in {small_sizes[0], small_sizes[-1]} - measured_s.keys():
            costs[size] = self._shortest_s(calls, size)
        available_s = self._remaining_s()
        for selection in (self._sizes, *_SELECTIONS):
            selected = tuple(size for size in self._sizes if size in selection)
            if sum(_NUM_POSITIONS * _expected_s(costs, size) for size in selected) <= available_s:
                break
        return selected

    def _agreeing_sets(
        self, calls: Iterator[Call], sizes: Sequence[int], measured_s: Mapping[int, float]
    ) -> list[dict[int, float]]:
        """Group row counts into disjoint sets that give bitwise identical results. Some row counts may be in no set.

        Returns the cost of each row count of each set.

        Args:
            calls: matmuls with the weight.
            sizes: row counts, in ascending order.
            measured_s: measured costs of some row counts.
        """
        rows = self.rows[: sizes[-1]]
        order = torch.randperm(sizes[-1], generator=torch.Generator().manual_seed(0))
        sets: list[tuple[torch.Tensor, dict[int, float]]] = []  # the result of a set for all rows, and its costs
        for size in reversed(sizes):
            positions: list[slice | torch.Tensor] = [slice(-size, None), order[:size]]
            if size < sizes[-1]:
                positions.append(slice(size))
            results, call_times = [], []
            for position in positions:
                result, call_time = self._watch.time(next(calls), aligned_rows(rows[position]))
                results.append(result)
                call_times.append(call_time)

            costs = next((costs for expected, costs in sets if _agree(expected, positions, results)), None)
            if costs is None:
                if size < min(_MIN_SET_ROWS, sizes[-1]):
                    continue
                # Begin a new set, unless calls with this row count do not even agree with each other.
                expected = results[0] if size == sizes[-1] else in_tiles(next(calls), rows, RowTiles({size: 1.0}))
                if not _agree(expected, positions, results):
                    continue
                costs = {}
                sets.append((expected, costs))
            if size in measured_s:
                costs[size] = measured_s[size]
            else:
                costs[size] = self._shortest_s(calls, size, call_times)
        return [costs for _, costs in sets]

    def _remaining_s(self, reserved_s: float = 0.0) -> float:
        return self.end_s - self._watch.now() - reserved_s

    def _shortest_s(self, calls: Iterator[Call], num_rows: int, earlier: Sequence[CallTime] = ()) -> float:
        return self._watch.shortest_s(calls, aligned_rows(self.rows[:num_rows]), earlier)

    def _score(self, candidate: _RankedBackend) -> float:
        return _score([candidate.costs[size] / candidate.allowance for size in self._scored_rows])


def _agree(expected: torch.Tensor, positions: Sequence[slice | torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether results are bitwise identical to those that are expected at some positions of rows."""
    return all(torch.equal(result, expected[position]) for result, position in zip(results, positions, strict=True))


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
        return _DEFAULT_CACHE_BYTES


def _pack(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Call:
    """Pack a weight. Returns the matmul with it."""
    backend = GEMM_BACKENDS[name]
    packed = backend.pack(weight)
    return lambda rows: backend.multiply(rows, packed, bias)


def _score(times_s: Sequence[float]) -> float:
    """Sum the logarithms of times: lower is better, and a speedup counts the same for few rows as for many."""
    return sum(math.log(max(time_s, 1e-9)) for time_s in times_s)


def _expected_s(costs: Mapping[int, float], num_rows: int) -> float:
    """Extrapolate the cost of a row count linearly from the costs of small ones."""
    smallest, largest = min(costs), max(size for size in costs if size <= _MIN_SET_ROWS)
    row_s = max(0.0, costs[largest] - costs[smallest]) / max(1, largest - smallest)
    return costs[smallest] + (num_rows - smallest) * row_s
