"""Summarizes samples: medians, ratios to the best peer, and first tokens that differ."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.parts.peers.engines import OURS, PeerSetting
from bench.parts.peers.rows import PeerRow, PeerSample

Result = dict[str, Any]


def is_ours(engine: str) -> bool:
    """Whether an engine is radixkv, in one of its modes."""
    return engine.partition("-")[0] == OURS


def compare(
    name: str,
    row: PeerRow,
    setting: PeerSetting,
    samples: Mapping[str, Sequence[PeerSample]],
    min_s: float | None = None,
) -> Result:
    """Compare a row's engines.

    Args:
        samples: samples of each engine, by repetition; an engine that crashed has fewer, or none.
        min_s: the limit of this machine for the time of one `row.unit` (see `machine_limits`); None if unknown.

    Returns:
        The row with, for each engine, medians and all samples of wall and CPU time in seconds, and the number of its
        first tokens that differ from those of most engines. `ratio` is our time divided by that of the best peer, below
        1 if ours is shorter; None if one of them is missing. `cpu_ratio` is the ratio of CPU times, for which another
        peer may be the best.
    """
    engines = {engine: _summarize(each) for engine, each in samples.items() if each}
    different = count_different(_first_tokens_by_repetition(samples))
    for engine, summary in engines.items():
        summary["first_tokens"], summary["different_first_tokens"] = different[engine]
    best, ratios = _ratios(engines, "wall_s")
    cpu_best, cpu_ratios = _ratios(engines, "cpu_s")
    return {
        "row": name,
        "title": row.title,
        "unit": row.unit,
        "model": setting.model,
        "dtype": setting.dtype,
        "threads": setting.threads,
        "shared_tokens": row.shared_tokens,
        "own_tokens": row.own_tokens,
        "prompts": row.num_prompts,
        "at_once": row.at_once,
        "new_tokens": row.new_tokens,
        "engines": engines,
        "least_s": min_s,
        "best_peer": best,
        "ratio": ratios.get(OURS),
        "ratios": ratios,
        "cpu_best_peer": cpu_best,
        "cpu_ratio": cpu_ratios.get(OURS),
        "cpu_ratios": cpu_ratios,
    }


def by_setting(rows: Sequence[Result]) -> dict[PeerSetting, list[Result]]:
    """Group the results of `compare` by their setting, in the order of the rows."""
    groups: dict[PeerSetting, list[Result]] = {}
    for row in rows:
        groups.setdefault(PeerSetting(row["model"], row["dtype"], row["threads"]), []).append(row)
    return groups


def count_different(repetitions: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """Count the first tokens of each engine, and those among them that differ from the most common one for the prompt.

    If several tokens are equally common, that of the first engine is taken. `repetitions` has the first tokens of each
    engine, one per prompt, for each repetition.

    >>> count_different([{"a": [1, 2], "b": [1, 2], "c": [1, 3]}, {"a": [5], "c": [6]}])
    {'a': (3, 0), 'b': (2, 0), 'c': (3, 2)}
    """
    counts: dict[str, tuple[int, int]] = {}
    for by_engine in repetitions:
        most_common = [Counter(tokens).most_common(1)[0][0] for tokens in zip(*by_engine.values(), strict=True)]
        for engine, tokens in by_engine.items():
            total, different = counts.get(engine, (0, 0))
            num_other = sum(token != common for token, common in zip(tokens, most_common, strict=True))
            counts[engine] = (total + len(tokens), different + num_other)
    return counts


def _first_tokens_by_repetition(samples: Mapping[str, Sequence[PeerSample]]) -> list[dict[str, tuple[int, ...]]]:
    """Return, for each repetition, the first tokens of the engines that have a sample of it."""
    num_repetitions = max(map(len, samples.values()), default=0)
    return [
        {engine: each[index].first_tokens for engine, each in samples.items() if index < len(each)}
        for index in range(num_repetitions)
    ]


def _summarize(samples: Sequence[PeerSample]) -> Result:
    return {
        "wall_s": statistics.median(each.wall_s for each in samples),
        "cpu_s": statistics.median(each.cpu_s for each in samples),
        "wall_s_each": [each.wall_s for each in samples],
        "cpu_s_each": [each.cpu_s for each in samples],
        "cached_tokens": samples[-1].cached_tokens,
    }


def _ratios(engines: Mapping[str, Result], key: str) -> tuple[str | None, dict[str, float]]:
    """Return the best peer, and for each of our modes its time divided by that of the best peer."""
    peers = {engine: each[key] for engine, each in engines.items() if not is_ours(engine)}
    best = min(peers, key=lambda engine: peers[engine], default=None)
    if best is None or not peers[best]:
        return best, {}
    return best, {engine: each[key] / peers[best] for engine, each in engines.items() if is_ours(engine)}
