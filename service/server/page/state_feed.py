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
from radixkv.cache.block_pool import BlockState
from radixkv.doctor.advice import ADVICE
from radixkv.errors import CapacityError, LifecycleError
from radixkv.service.server.hottest_segments import HottestSegments
from radixkv.service.server.opaque_ids import NamespaceIds

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

MAX_SEGMENTS = 250
MAX_TENANTS = 25
MAX_CELLS = 1024
MAX_CAUSES = 10
_TIMEOUT_S = 5.0  # per state; the engine answers between two steps
_FRESH_S = 0.5  # how long a state is returned to all pages before it is computed again

_T = TypeVar("_T")


class StateFeed:
    """Returns the state that pages draw. It is computed at most twice per second, however many pages poll.

    A state takes at most 34 engine calls of less than 1 ms each. It has no tokens and no salts.

    Args:
        engine: the engine whose state is returned.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._namespace_ids = NamespaceIds()
        self._lock = threading.Lock()  # guards the attributes below
        self._state: bytes | None = None
        self._fresh_until_s = -math.inf

    def state(self) -> bytes | None:
        """Return the state as JSON; None if the engine accepts no calls or does not respond in time. Thread-safe.

        Concurrent calls share one computation, so that they do not wait for one timeout after the other.
        """
        with self._lock:
            if self._clock() >= self._fresh_until_s:
                self._state = self._compute_state()
                self._fresh_until_s = self._clock() + _FRESH_S
            return self._state

    def _compute_state(self) -> bytes | None:
        end_s = time.monotonic() + _TIMEOUT_S
        try:
            stats = _result(self._engine.stats(MAX_TENANTS), end_s)
            hottest = HottestSegments(MAX_SEGMENTS)
            while (future := hottest.next_call(self._engine.segments)) is not None:
                hottest.add(_result(future, end_s))
            block_states = _result(self._engine.segments.block_states(), end_s)
        except (CapacityError, LifecycleError, TimeoutError, CancelledError):
            return None
        limits = self._engine.limits
        stats_fields = dataclasses.asdict(stats)
        load_fields = stats_fields.pop("load")
        tiers = () if self._engine.offload is None else self._engine.offload.stats()
        state = {
            "version": __version__,
            "model": limits.model,
            "device": limits.device,
            "epoch": str(limits.epoch),  # has more bits than a number in a browser
            "is_healthy": self._engine.is_healthy,
            "block_size": limits.block_size,
            **load_fields,
            **stats_fields,
            "num_segments": hottest.num_segments,
            "compared_segments": hottest.num_compared,
            "segments": [self._segment(segment) for segment in hottest.result()],
            "block_map": block_map(block_states),
            "tiers": [dataclasses.asdict(tier) for tier in tiers],
            "misses": self._misses(),
        }
        return json.dumps(state, separators=(",", ":")).encode()

    def _misses(self) -> dict[str, Any] | None:
        """Return the causes of misses, without samples; None if they are not examined."""
        profiler = self._engine.misses
        if profiler is None:
            return None
        report = profiler.report(None, MAX_CAUSES)
        return {
            "covered_s": report.covered_s,
            **report.counts._asdict(),
            "causes": [
                {
                    "tenant": tenant,
                    "place": group.key.place,
                    "pattern": group.key.pattern,
                    "prompts": group.num_prompts,
                    "lost_tokens": group.lost_tokens,
                    "is_bound": group.is_bound,
                    **ADVICE[group.key.cause]._asdict(),
                }
                for tenant, group in report.groups
            ],
        }

    def _segment(self, segment: Segment) -> dict[str, Any]:
        namespace = segment.namespace
        return {
            "id": segment.number,
            "parent": segment.parent_number,
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
            "session": segment.session_id,
            "awaits": segment.awaits.name.lower(),
        }


def block_map(states: bytes) -> dict[str, Any]:
    """Count the blocks in each `BlockState`, in at most `MAX_CELLS` cells of adjacent blocks.

    >>> block_map(bytes([0, 1, 2]))
    {'blocks_per_cell': 1, 'cells': [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}
    """
    blocks_per_cell = max(1, -(-len(states) // MAX_CELLS))
    blocks = np.frombuffer(states, dtype=np.uint8)
    starts = np.arange(0, blocks.size, blocks_per_cell)
    counts = [np.add.reduceat(blocks == state, starts, dtype=np.int64) for state in BlockState] if blocks.size else []
    cells = np.stack(counts, axis=1).tolist() if counts else []
    return {"blocks_per_cell": blocks_per_cell, "cells": cells}


def _result(future: Future[_T], end_s: float) -> _T:
    """Wait for a result of the engine until `end_s`, and cancel the call if it does not arrive."""
    try:
        return future.result(max(0.0, end_s - time.monotonic()))
    except TimeoutError:
        future.cancel()
        raise
