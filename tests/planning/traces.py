"""Traces for tests of simulations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest


def trace(
    paths: Iterable[Sequence[int]], every_ms: float = 1000, *, prompt_lengths: Sequence[int] | None = None
) -> list[TraceRequest]:
    """Return a request for each path, which lists the ids of its blocks; without lengths, all blocks are full."""
    paths = list(paths)
    lengths = prompt_lengths or [len(path) * TOKENS_PER_ID for path in paths]
    return [TraceRequest(index * every_ms, lengths[index], 1, tuple(path)) for index, path in enumerate(paths)]
