"""Runs an engine in this process, for benchmarks that call it without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.startup.build_engine import build_engine


@contextlib.contextmanager
def running_engine(settings: Sequence[str]) -> Iterator[Engine]:
    """Run an engine with these settings, `section.key=value` each, inside a `with` statement."""
    engine = build_engine(Config.load(None, list(settings)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
