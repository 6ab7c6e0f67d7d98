"""Deadlines of prompts: the caller's own, within bounds."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time that prompts have, so that none stays for ever.

    Attributes:
        default_s: seconds of a prompt that comes without a deadline.
        most_s: seconds that no prompt exceeds.
    """

    default_s: float
    most_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> Deadlines:
        """Return those of a configuration."""
        return cls(config.default_deadline_s, config.max_deadline_s)

    def seconds_left(self, asked_s: float | None) -> float:
        """Return the seconds that a prompt has.

        >>> [Deadlines(600, 3600).seconds_left(asked_s) for asked_s in (None, 5, 1e9)]
        [600, 5, 3600]

        Args:
            asked_s: seconds until the caller's deadline; None without one.
        """
        return min(self.default_s if asked_s is None else asked_s, self.most_s)
