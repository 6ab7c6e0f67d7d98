"""How long prefills and loads take, as far as a simulation needs it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError

_MAX_FITTED_PREFILLS = 10_000
_NUM_ITERATIONS = 30
_MIN_TOKEN_S = 1e-12  # in place of 0, which `TimeModel.read` refuses, and which would be an infinite rate
_MIN_FITTED_S = 1e-9  # in place of shorter times, so that weights are finite
_MIN_RESIDUAL = 1e-3  # of the fitted time; a smaller one gets no larger weight


@dataclass(frozen=True, slots=True)
class MeasuredPrefill:
    """A prefill whose duration a server has measured.

    Attributes:
        start, end: the tokens of the prompt from `start` to `end` were computed, the others were cached.
        loaded_tokens: tokens that were loaded for it, by name of the tier.
        ttft_s: seconds from the arrival of the request to its first token.
    """

    start: int
    end: int
    loaded_tokens: Mapping[str, int]
    ttft_s: float


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How long loads from a tier take: `latency_s + bytes / bytes_per_s`, one load after the other.

    Attributes:
        bytes_per_s: rate from the tier into the pool.
        latency_s: seconds of a load that do not depend on its size.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeModel:
    """How long one server takes to compute or load tokens.

    A prefill that computes the tokens from `start` to `end` takes

        start_s + (end - start) * token_s + (sum of the positions of these tokens) * position_s

    Attributes:
        token_bytes: bytes of K and V per token, all layers.
        token_s: seconds per token, without attention to the tokens before it.
        position_s: seconds per pair of a token and a token before it.
        start_s: seconds of a prefill that do not depend on its length.
        tiers: load times by name of the tier. Loads from other tiers take no time.
    """

    token_bytes: float
    token_s: float
    position_s: float = 0.0
    start_s: float = 0.0
    tiers: Mapping[str, LoadTime] = field(default_factory=dict)

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds of a prefill that computes the tokens from `start` to `end` of a prompt.

        >>> TimeModel(token_bytes=1024, token_s=0.001, position_s=1e-6).prefill_s(0, 1000)
        1.4995
        """
        return self.start_s + (end - start) * self.token_s + _position_sum(start, end) * self.position_s

    def load_s(self, tier: str, num_tokens: int) -> float:
        """Return the seconds of a load from a tier."""
        times = self.tiers.get(tier)
        return 0.0 if times is None else times.latency_s + num_tokens * self.token_bytes / times.bytes_per_s

    def write(self, path: Path) -> None:
        """Write a JSON file for `read`."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def fit(cls, measured: Sequence[MeasuredPrefill], token_bytes: float = 1.0) -> TimeModel:
        """Return the model whose times are closest to measured ones: about half of them are longer, and half shorter.

        The fit minimizes the sum of the absolute errors divided by the fitted times, with coefficients of at least 0,
        so that a few requests that waited long for others have little effect. What all requests waited is included in
        the fitted times. Of more than 10,000 prefills, every second one is used, or every third one and so on, so that
        at most 10,000 are.

        Args:
            measured: at least one prefill.
            token_bytes: bytes of K and V per token, the unit of the rates of tiers. 1 gives rates in tokens.
        """
        measured = measured[:: -(-len(measured) // _MAX_FITTED_PREFILLS)]
        tiers = sorted({name for each in measured for name, num_tokens in each.loaded_tokens.items() if num_tokens})
        # [num_prefills, 3 + 2 * num_tiers]
        rows = np.array([_terms(each, tiers) for each in measured], dtype=np.float64)
        start_s, token_s, position_s, *loads = _fit_median(rows, np.array([each.ttft_s for each in measured]))
        load_times = {}
        for index, name in enumerate(tiers):
            latency_s, loaded_token_s = loads[2 * index : 2 * index + 2]
            load_times[name] = LoadTime(token_bytes / max(loaded_token_s, _MIN_TOKEN_S), latency_s)
        return cls(token_bytes, max(token_s, _MIN_TOKEN_S), position_s, start_s, load_times)

    @classmethod
    def read(cls, path: Path) -> TimeModel:
        """Read a JSON file with the attributes of this class, `tiers` as an object of objects.

        Raises:
            ConfigError: the file cannot be read, or a field is missing, unknown or not a number above 0 (those with a
                default may be 0). The message names the file and the field.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"time model {path}: expected a JSON file: {error}") from error
        numbers = _read_numbers(path, "", fields, cls, others=["tiers"])
        tiers = fields.get("tiers", {})
        if not isinstance(tiers, dict):
            raise ConfigError(f"time model {path}: tiers: expected an object, got {tiers!r}")
        load_times = {
            name: LoadTime(**_read_numbers(path, f"tiers.{name}.", each, LoadTime)) for name, each in tiers.items()
        }
        return cls(**numbers, tiers=load_times)


def _position_sum(start: int, end: int) -> float:
    return (end - start) * (start + end - 1) / 2


def _terms(measured: MeasuredPrefill, tiers: Sequence[str]) -> list[float]:
    """Return the factors of a model's coefficients for one prefill.

    First the factors of `start_s`, `token_s` and `position_s`, then, for each tier, those of its latency and of its
    seconds per token. The sum of all coefficients times their factors is the time to the first token.
    """
    terms = [1.0, measured.end - measured.start, _position_sum(measured.start, measured.end)]
    for name in tiers:
        num_loaded_tokens = measured.loaded_tokens.get(name, 0)
        terms += [float(num_loaded_tokens > 0), float(num_loaded_tokens)]
    return terms


def _fit_median(rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> list[float]:
    """Minimize the sum of the absolute relative errors by iteratively reweighted least squares.

    Args:
        rows: float64 `[num_rows, num_columns]`, non-negative.
        seconds: float64 `[num_rows]`, positive.

    Returns:
        `num_columns` non-negative coefficients.
    """
    seconds = np.maximum(seconds, _MIN_FITTED_S)
    weights = 1 / seconds
    for _ in range(_NUM_ITERATIONS):
        coefficients = _non_negative_fit(rows * weights[:, None], seconds * weights)
        fitted = np.maximum(rows @ coefficients, _MIN_FITTED_S)
        weights = 1 / np.sqrt(fitted * np.maximum(np.abs(seconds - fitted), _MIN_RESIDUAL * fitted))
    return list(map(float, coefficients))


def _non_negative_fit(rows: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the least-squares coefficients. Columns whose coefficient would be negative are left out, one by one."""
    scales = np.linalg.norm(rows, axis=0)  # the columns have very different sizes
    used = np.flatnonzero(scales)
    while used.size:
        solution = np.linalg.lstsq(rows[:, used] / scales[used], values, rcond=None)[0]
        if (solution >= 0).all():
            break
        used = np.delete(used, np.argmin(solution))
    coefficients = np.zeros(rows.shape[1])
    coefficients[used] = solution / scales[used]
    return coefficients


def _read_numbers(path: Path, prefix: str, fields: Any, model: type[Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """Validate an object of the file, which has the attributes of `model`, and return its fields except `others`."""
    if not isinstance(fields, dict):
        raise ConfigError(f"time model {path}: {prefix.removesuffix('.') or 'the file'}: expected an object")
    # Numbers with a default have the default 0; None for the others, which are required.
    defaults = {each.name: None if each.default is dataclasses.MISSING else 0.0 for each in dataclasses.fields(model)}
    names = [name for name in defaults if name not in others]
    if unknown := [name for name in fields if name not in defaults]:
        raise ConfigError(f"time model {path}: {prefix}{unknown[0]}: expected one of {', '.join(names)}")
    for name in names:
        value: Any = fields.get(name, defaults[name])
        is_required = defaults[name] is None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max or value < 0 or (value == 0 and is_required):
            bound = "above 0" if is_required else "of at least 0"
            raise ConfigError(f"time model {path}: {prefix}{name}: expected a number {bound}, got {value!r}")
    return {name: fields[name] for name in names if name in fields}
