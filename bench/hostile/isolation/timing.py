"""Compares the response times of prompts that another tenant, no tenant, or the caller has cached."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.service.client import AsyncClient

_NUM_TOKENS = 192
_TIMEOUT_S = 60.0
_NUM_TERMS = 100  # of the series of the Kolmogorov-Smirnov test


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of a timing audit.

    Attributes:
        samples: number of prompts per arm.
        other_ms, uncached_ms, own_ms: median response times of prompts that another tenant, no tenant or the caller has
            cached.
        p_other: p-value of `other` compared with `uncached`. If it is not small, the times reveal nothing.
        p_own: p-value of `own` compared with `uncached`. It must be small: then the audit can detect a hit by its time.
        cross_hits: cached tokens that were reported for prompts of the arms `other` and `uncached`.
    """

    samples: int
    other_ms: float
    uncached_ms: float
    own_ms: float
    p_other: float
    p_own: float
    cross_hits: int


async def audit(address: str, num_samples: int, seed: int) -> Audit:
    """Time prompts of one tenant, the three arms in random order, each prompt once."""
    rng = np.random.default_rng(seed)
    prompts = {arm: rng.integers(1, 200, (num_samples, _NUM_TOKENS)) for arm in ("other", "uncached", "own")}
    for arm in ("other", "uncached"):  # prompts that share no prefix with what the caller has cached
        prompts[arm][:, 0] = rng.integers(200, 256, num_samples)
    took_ms: dict[str, list[float]] = {arm: [] for arm in prompts}
    cross_hits = 0
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        for other, own in zip(prompts["other"], prompts["own"], strict=True):
            await client.prefill(other, tenant="victim")
            await client.prefill(own, tenant="attacker")
        for number in range(num_samples):
            for arm in rng.permutation(list(prompts)):
                milliseconds, cached_tokens = await _time_prefill(client, prompts[arm][number])
                took_ms[arm].append(milliseconds)
                if arm != "own":
                    cross_hits += cached_tokens
    return Audit(
        samples=num_samples,
        other_ms=statistics.median(took_ms["other"]),
        uncached_ms=statistics.median(took_ms["uncached"]),
        own_ms=statistics.median(took_ms["own"]),
        p_other=p_value(took_ms["other"], took_ms["uncached"]),
        p_own=p_value(took_ms["own"], took_ms["uncached"]),
        cross_hits=cross_hits,
    )


async def _time_prefill(client: AsyncClient, prompt: npt.NDArray[np.int64]) -> tuple[float, int]:
    start_s = time.perf_counter()
    answer = await client.prefill(prompt, tenant="attacker", write_cache=False)
    return (time.perf_counter() - start_s) * 1000, answer.usage.cached_tokens


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test (asymptotic formula).

    It is the probability that two samples of one distribution differ as much as these. The formula is good from about
    30 values in each sample on.

    Source: Press et al., Numerical Recipes, 14.3.
    """
    ordered = [np.sort(np.asarray(sample, dtype=np.float64)) for sample in (first, second)]
    all_values = np.concatenate(ordered)
    cumulative_shares = [np.searchsorted(sample, all_values, side="right") / len(sample) for sample in ordered]
    distance = float(np.abs(cumulative_shares[0] - cumulative_shares[1]).max())
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series converges too slowly here, and its value is 1 to ten digits
    terms = (2.0 * (-1.0) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _NUM_TERMS + 1))
    return float(min(1.0, max(0.0, math.fsum(terms))))
