"""An attack: its preparation, its calls, and the server that it attacks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from bench.parts.null_service import VOCAB_SIZE

LARGE_POOL = ("cache.block_size=16", "cache.capacity_tokens=8388608")
LONG_TOKENS = 131_072

Figures = dict[str, float]
"""Number of calls by status, and other numbers that an attack measured."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is attacked, for how long, and at which scale.

    Attributes:
        address: address of the server.
        seconds: duration of the attack.
        scale: share of the full number of prompts, nodes, tenants and connections; tests take less than 1.
        http_address: address of its HTTP port; empty without one. The well-behaved client uses this port if there is
            one.
    """

    address: str
    seconds: float
    scale: float = 1.0
    http_address: str = ""

    def scaled(self, number: int) -> int:
        """Return a number multiplied by `scale`; at least 1."""
        return max(1, round(number * self.scale))


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack that is bounded in calls, connections and time, and ends what it began.

    Attributes:
        run: attacks for `Target.seconds`.
        prepare: fills the cache before the well-behaved client starts.
        settings: settings of the server, as `section.key=value`.
        vocab_size: vocabulary size of the model.
        num_connections: maximum number of connections that it has open at the same time.
        is_http: whether it attacks the HTTP port.
    """

    run: Callable[[Target], Coroutine[Any, Any, Figures]]
    prepare: Callable[[Target], Coroutine[Any, Any, Figures]] | None = None
    settings: tuple[str, ...] = ()
    vocab_size: int = VOCAB_SIZE
    num_connections: int = 16
    is_http: bool = False
