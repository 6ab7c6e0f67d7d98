"""How long prefills and loads take, as far as a simulation needs it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError


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
        num_tokens = end - start
        positions = num_tokens * (start + end - 1) / 2
        return self.start_s + num_tokens * self.token_s + positions * self.position_s

    def load_s(self, tier: str, num_tokens: int) -> float:
        """Return the seconds of a load from a tier."""
        times = self.tiers.get(tier)
        return 0.0 if times is None else times.latency_s + num_tokens * self.token_bytes / times.bytes_per_s

    def write(self, path: Path) -> None:
        """Write a JSON file for `read`."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

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
        numbers = _numbers(path, "", fields, cls, others=["tiers"])
        tiers = fields.get("tiers", {})
        if not isinstance(tiers, dict):
            raise ConfigError(f"time model {path}: tiers: expected an object, got {tiers!r}")
        times = {name: LoadTime(**_numbers(path, f"tiers.{name}.", each, LoadTime)) for name, each in tiers.items()}
        return cls(**numbers, tiers=times)


def _numbers(path: Path, prefix: str, fields: Any, kind: type[Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """Validate an object of the file, and return its fields except `others`."""
    if not isinstance(fields, dict):
        raise ConfigError(f"time model {path}: {prefix.removesuffix('.') or 'the file'}: expected an object")
    minima = {each.name: None if each.default is dataclasses.MISSING else 0.0 for each in dataclasses.fields(kind)}
    names = [name for name in minima if name not in others]
    if unknown := [name for name in fields if name not in minima]:
        raise ConfigError(f"time model {path}: {prefix}{unknown[0]}: expected one of {', '.join(names)}")
    for name in names:
        value: Any = fields.get(name, minima[name])
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max or value < 0 or (value == 0 and minima[name] is None):
            bound = "above 0" if minima[name] is None else "of at least 0"
            raise ConfigError(f"time model {path}: {prefix}{name}: expected a number {bound}, got {value!r}")
    return {name: fields[name] for name in names if name in fields}
