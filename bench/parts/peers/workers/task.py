"""Messages between the benchmark and a worker: a line of JSON each way. Imports the standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to answer, in order.

    Attributes:
        prompts: token ids of each prompt.
        new_tokens: tokens to generate greedily after each prompt, without stopping at an end-of-sequence token.
        at_once: requests in flight; the next one starts when one ends.
        shared_tokens: leading tokens that all prompts share and that an earlier task computed; 0 for none. Used only
            by an engine without a prefix cache.
        fills_cache: the task only fills the cache with the shared tokens of the tasks after it, and is not timed.
    """

    prompts: list[list[int]]
    new_tokens: int
    at_once: int = 1
    shared_tokens: int = 0
    fills_cache: bool = False

    def to_line(self) -> str:
        """Write the task as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read what `to_line` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Done:
    """Answers to a task, in the order of its prompts.

    Attributes:
        wall_s: time from the first request to the end of the last one.
        first_s: time from each request to its first token.
        token_ids: tokens of each answer.
        cached_tokens: prompt tokens that the engine reused; None if it does not report this.
    """

    wall_s: float
    first_s: list[float]
    token_ids: list[list[int]]
    cached_tokens: list[int | None]


@dataclass(frozen=True, slots=True)
class Ready:
    """The first line that a worker prints.

    Attributes:
        versions: version of each package that the results depend on.
        notes: facts about this engine that a reader of the results must know.
    """

    versions: dict[str, str]
    notes: list[str]


def to_line(kind: str, value: Ready | Done | str) -> str:
    """Return a line of a worker: `{"ready": ...}`, `{"done": ...}` or `{"error": "..."}`."""
    return json.dumps({kind: value if isinstance(value, str) else asdict(value)}) + "\n"


def from_line(line: str) -> Ready | Done | str:
    """Parse a line of a worker. A `str` is the error that it reports.

    Raises:
        ValueError: the line is none of the three.
    """
    parsers: dict[str, Any] = {"ready": lambda value: Ready(**value), "done": lambda value: Done(**value), "error": str}
    try:
        message = json.loads(line)
        [(kind, value)] = message.items()
        parsed: Ready | Done | str = parsers[kind](value)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"worker: expected a line with ready, done or error, got {line[:200]!r}") from None
    return parsed
