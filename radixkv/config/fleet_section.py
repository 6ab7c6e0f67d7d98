"""The section of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import OneOf, Range, require_fields
from radixkv.errors import ConfigError

_MAX_INT32 = 2**31 - 1
_YEAR_S = 366 * 24 * 3600
_Replicas = Annotated[int, Range(1, 999_999)]


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet on Ray: how `radixkv fleet` routes. A single server reads none of it.

    Attributes:
        routing: `prefix` is the rule; `least-loaded`, `longest-prefix` and `round-robin` are there to compare with.
        least_match_tokens: fewer cached tokens than these draw no request to a replica.
        health_timeout_s: seconds without an answer to a health check after which calls that wait for a replica are
            given up, and sent to another one where nothing was answered yet.
        start_timeout_s: seconds that a request waits for a replica while none is there.
        calls_per_replica: calls under way for each replica that a fleet which grows by its load aims at.
        grow_after_s: seconds for which more replicas must be wanted before they are added.
        shrink_after_s: seconds for which fewer must be wanted before some are drained and removed.
        prefill_replicas: replicas that compute prompts; others generate from their K/V. None: all do both.
        decode_replicas: those others; None exactly if `prefill_replicas` is.
        tls_ca: PEM file with the authorities of the replicas' certificates. With it replicas have the TLS of section
            `server`; without it, none. Each machine has these files at the same paths.
        tls_name: name in these certificates; empty for the replica's address.
    """

    routing: Annotated[str, OneOf("prefix", "longest-prefix", "least-loaded", "round-robin")] = "prefix"
    least_match_tokens: Annotated[int, Range(0, _MAX_INT32)] = 1024
    health_timeout_s: Annotated[float, Range(0.1, 600)] = 3.0
    start_timeout_s: Annotated[float, Range(0, _YEAR_S)] = 30.0
    calls_per_replica: Annotated[float, Range(0.01, 1e6)] = 8.0
    grow_after_s: Annotated[float, Range(0, _YEAR_S)] = 30.0
    shrink_after_s: Annotated[float, Range(0, _YEAR_S)] = 600.0

    prefill_replicas: _Replicas | None = None
    decode_replicas: _Replicas | None = None
    tls_ca: str | None = None
    tls_name: str = ""

    def __post_init__(self) -> None:
        require_fields("fleet", self)

    @property
    def has_roles(self) -> bool:
        """Whether some replicas compute prompts and others generate.

        Raises:
            ConfigError: only one of the two numbers is there.
        """
        numbers = {"prefill_replicas": self.prefill_replicas, "decode_replicas": self.decode_replicas}
        missing = [name for name, number in numbers.items() if number is None]
        if len(missing) == 1:
            (there,) = numbers.keys() - set(missing)
            raise ConfigError(f"fleet.{missing[0]}: expected a number beside fleet.{there}, got none")
        return not missing
