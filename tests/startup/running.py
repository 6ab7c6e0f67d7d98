"""Runs an engine for the time of a block, and waits for its stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from radixkv.engine.engine import Engine
from tests.patience import PATIENCE_S


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Start an engine, check every invariant at the end of the block unless it raises, and stop the engine."""
    engine.start()
    try:
        yield engine
        engine.check().result(PATIENCE_S)
    finally:
        engine.stop()


def settle(engine: Engine) -> None:
    """Wait until the stores have all evicted blocks, and the engine has been notified."""
    assert engine.offload is not None
    engine.purge(tenant="unknown").result(PATIENCE_S)  # completes after all earlier operations of the stores
    engine._call(engine.offload._saver.flush).result(PATIENCE_S)
