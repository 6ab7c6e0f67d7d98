"""What is worth keeping, for how long: priorities of nodes, when they end, and how many blocks they cover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from radixkv.errors import InvalidRequest

if TYPE_CHECKING:
    pass

MAX_PRIORITY = 100
MAX_TTL_S = 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """What a caller asks for a range of a prompt.

    Attributes:
        priority: 0 to 100. Unused blocks of lower priority are evicted first; 50 is that of all that nobody asked for.
        ttl_s: seconds after which the range has priority 50 again; None for as long as it is cached.
        start, end: the range in tokens; without an end, up to the prompt's.
    """

    priority: int
    ttl_s: float | None = None
    start: int = 0
    end: int | None = None

    def range_in(self, num_tokens: int) -> tuple[int, int]:
        """The range in a prompt of so many tokens.

        Raises:
            InvalidRequest: the message names the field, what was expected and what came.
        """
        end = num_tokens if self.end is None else self.end
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(f"retention.priority: expected 0 to {MAX_PRIORITY}, got {self.priority}")
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"retention.ttl: expected more than 0 and at most {MAX_TTL_S:.0f} s, got {self.ttl_s}")
        if not 0 <= self.start < num_tokens:
            raise InvalidRequest(f"retention.start_token: expected 0 to {num_tokens - 1}, got {self.start}")
        if not self.start < end <= num_tokens:
            raise InvalidRequest(f"retention.end_token: expected {self.start + 1} to {num_tokens}, got {end}")
        return self.start, end


class Grant(NamedTuple):
    """What became of a retention, in tokens of its range; the first three add up to it.

    Attributes:
        granted_tokens: have the priority now, or had a higher one that stays.
        refused_tokens: are cached, but beyond what may be retained.
        uncached_tokens: are not there.
        expires_s: when the first of what was granted has its priority no more, by the cache's clock; None for never.
    """

    granted_tokens: int
    refused_tokens: int
    uncached_tokens: int
    expires_s: float | None = None

    def joined(self, other: Grant) -> Grant:
        """What became of two ranges together."""
        ends_s = [end for end in (self.expires_s, other.expires_s) if end is not None]
        return Grant(
            self.granted_tokens + other.granted_tokens,
            self.refused_tokens + other.refused_tokens,
            self.uncached_tokens + other.uncached_tokens,
            min(ends_s, default=None),
        )


DEFAULT_PRIORITY = 50
