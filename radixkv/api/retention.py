"""The retention that a caller requests, and the part of it that was granted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixkv.errors import InvalidRequest

DEFAULT_PRIORITY = 50
MAX_PRIORITY = 100
MAX_TTL_S = 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """A request to keep a range of a prompt longer than the rest of the cache, or to evict it earlier.

    Attributes:
        priority: 0 to 100. Unused blocks of lower priority are evicted first. Without a retention it is 50.
        ttl_s: seconds after which the range has priority 50 again; None for as long as it is cached.
        start: first token of the range.
        end: the token after the last one of the range; None for the end of the prompt.
        renew: whether each request that finds the range on the device restarts `ttl_s`.
    """

    priority: int
    ttl_s: float | None = None
    start: int = 0
    end: int | None = None
    renew: bool = False

    def range_in(self, num_tokens: int) -> tuple[int, int]:
        """Return the range `[start, end)` in a prompt of `num_tokens` tokens.

        Raises:
            InvalidRequest: the message names the field, the expected range and the value.

        Example:
            >>> Retention(priority=80, start=3).range_in(10)
            (3, 10)
        """
        self.require_valid()
        end = num_tokens if self.end is None else self.end
        if not 0 <= self.start < num_tokens:
            raise InvalidRequest(f"retention.start_token: expected 0 to {num_tokens - 1}, got {self.start}")
        if not self.start < end <= num_tokens:
            raise InvalidRequest(f"retention.end_token: expected {self.start + 1} to {num_tokens}, got {end}")
        return self.start, end

    def require_valid(self) -> None:
        """Check everything but the range.

        Raises:
            InvalidRequest: the message names the field, the expected range and the value.
        """
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(f"retention.priority: expected 0 to {MAX_PRIORITY}, got {self.priority}")
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"retention.ttl: expected more than 0 and at most {MAX_TTL_S:.0f} s, got {self.ttl_s}")
        if self.renew and self.ttl_s is None:
            raise InvalidRequest("retention.renew: expected a ttl, which hits restart, got none")


class Grant(NamedTuple):
    """The granted part of a retention. The three numbers of tokens add up to its range.

    Attributes:
        granted_tokens: tokens that have the priority now, or had a higher one before.
        refused_tokens: cached tokens that exceed what may be retained.
        uncached_tokens: tokens that are not cached.
        expires_s: when the first granted token loses its priority, by the cache's clock; None for never.
    """

    granted_tokens: int
    refused_tokens: int
    uncached_tokens: int
    expires_s: float | None = None

    def joined(self, other: Grant) -> Grant:
        """Add the grants of two ranges."""
        ends_s = [end for end in (self.expires_s, other.expires_s) if end is not None]
        return Grant(
            self.granted_tokens + other.granted_tokens,
            self.refused_tokens + other.refused_tokens,
            self.uncached_tokens + other.uncached_tokens,
            min(ends_s, default=None),
        )
