"""Objects that live long, such as the nodes of the cache, and that no collection should walk again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

_OLDEST = 2


@contextlib.contextmanager
def frozen_survivors() -> Iterator[None]:
    """Let each object be walked by one full collection at most, the first that it survives, until the block ends.

    A full collection of 100,000 nodes stops every request for a tenth of a second. What survives one is frozen, so the
    next one walks only what came since. Frozen objects go when nothing refers to them, as others do. Circles of them do
    not go before the end: calls leave none, and a collection that looked for others would stop every request again.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_freeze_survivors)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        gc.unfreeze()  # otherwise nanobind, which Triton uses, reports leaks on stderr at exit


def _freeze_survivors(phase: str, info: Mapping[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST:
        gc.freeze()
