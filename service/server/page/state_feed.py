"""The state of an engine as JSON, for the page that draws it."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from radixkv import __version__
from radixkv.api.segments import Segment
from radixkv.errors import CapacityError, LifecycleError
from radixkv.service.server.segments.hot_walk import HotWalk
from radixkv.service.server.segments.namespace_ids import NamespaceIds

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

MAX_SEGMENTS = 250
MAX_TENANTS = 25
MAX_CELLS = 1024
_TIMEOUT_S = 5.0  # for one state; the engine answers between two steps
_FRESH_S = 0.5

_T = TypeVar("_T")


class StateFeed:
    """Makes the state that pages draw, twice a second at most however many pages ask.

    A state is made of at most 34 calls of the engine, each of less than 1 ms. It has no tokens and no salts.

    Args:
        engine: is asked.
        clock: seconds, never going back.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._namespace_ids = NamespaceIds()
        self._lock = threading.Lock()  # guards what follows
        self._state: bytes | None = None
        self._fresh_until_s = -math.inf

    def state(self) -> bytes | None:
        """Return the state as JSON; None if the engine does not answer in time. From any thread.

        Those who ask meanwhile are told the same, so that none waits for a time of its own.
        """
        with self._lock:
            if self._clock() >= self._fresh_until_s:
                self._state = self._make()
                self._fresh_until_s = self._clock() + _FRESH_S
            return self._state

    def _make(self) -> bytes | None:
        end_s = time.monotonic() + _TIMEOUT_S
        try:
            stats = _answer(self._engine.stats(MAX_TENANTS), end_s)
            walk = HotWalk(MAX_SEGMENTS)
            while (future := walk.next_call(self._engine.segments)) is not None:
                walk.take(_answer(future, end_s))
            states = _answer(self._engine.segments.block_states(), end_s)
        except (CapacityError, LifecycleError, TimeoutError, CancelledError):
            return None
        limits, counts = self._engine.limits, dataclasses.asdict(stats)
        tiers = () if self._engine.offload is None else self._engine.offload.stats()
        state = {
            "version": __version__,
            "model": limits.model,
            "device": limits.device,
            "epoch": str(limits.epoch),  # more bits than numbers have in a browser
            "is_healthy": self._engine.is_healthy,
            "block_size": limits.block_size,
            **counts.pop("load"),
            **counts,
            "num_segments": walk.num_segments,
            "compared_segments": walk.num_compared,
            "segments": [self._segment(segment) for segment in walk.hottest()],
            "block_map": block_map(states),
            "tiers": [dataclasses.asdict(tier) for tier in tiers],
        }
        return json.dumps(state, separators=(",", ":")).encode()

    def _segment(self, segment: Segment) -> dict[str, Any]:
        namespace = segment.namespace
        return {
            "id": segment.place,
            "parent": segment.parent_place,
            "namespace": self._namespace_ids.of(namespace),
            "tenant": namespace.tenant,
            "adapter": namespace.adapter,
            "adapter_names": self._engine.adapters.names_of(namespace.adapter),
            "has_salt": bool(namespace.salt),
            "start": segment.start_token,
            "tokens": segment.num_tokens,
            "blocks": segment.num_blocks,
            "children": segment.num_children,
            "uses": segment.num_uses,
            "idle_s": round(segment.idle_s, 3),
            "heat": round(segment.heat, 3),
            "leases": segment.num_leases,
            "priority": segment.priority,
            "is_retained": segment.is_retained,
            "expires_in_s": segment.expires_in_s,
        }


def block_map(states: bytes) -> dict[str, Any]:
    """Sum block states up in cells of adjacent blocks, `MAX_CELLS` of them at most.

    >>> block_map(bytes([0, 1, 2]))
    {'blocks_a_cell': 1, 'cells': [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}
    """
    blocks_a_cell = max(1, -(-len(states) // MAX_CELLS))
    blocks = np.frombuffer(states, dtype=np.uint8)
    starts = np.arange(0, blocks.size, blocks_a_cell)
    counts = [np.add.reduceat(blocks == state, starts, dtype=np.int64) for state in range(3)] if blocks.size else []
    cells = np.stack(counts, axis=1).tolist() if counts else []
    return {"blocks_a_cell": blocks_a_cell, "cells": cells}


def _answer(future: Future[_T], end_s: float) -> _T:
    """Wait for an answer of the engine until `end_s`, and take the call back if it does not come."""
    try:
        return future.result(max(0.0, end_s - time.monotonic()))
    except TimeoutError:
        future.cancel()
        raise
