"""Finds objects that only the garbage collector frees."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uncollected() -> Iterator[list[Any]]:
    """Yield an empty list. When the block ends, it receives the objects that only the garbage collector can free."""
    cyclic_garbage: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield cyclic_garbage
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        cyclic_garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
