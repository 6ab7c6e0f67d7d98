"""The hottest segments of a cache of any size, in short calls of the engine."""

from __future__ import annotations

from concurrent.futures import Future

from radixkv.api.segments import Segment, SegmentPage
from radixkv.cache.segment_index import MAX_COMPARED, MAX_SEGMENTS
from radixkv.cache.segment_source import SegmentSource

MAX_CALLS = 32


class HotWalk:
    """Compares segments call by call, and keeps the hottest.

        while (future := walk.next_call(engine.segments)) is not None:
            walk.take(future.result())

    In a cache of up to `MAX_CALLS * MAX_COMPARED` places, 16,384, all segments are compared and the answer is exact.
    Of a larger one every n-th place is, and then also the segments before those that are found. A segment that is hot
    because many others continue it has many ways to be found, but a hot leaf may be missed.

    Args:
        max_segments: segments to keep, at most `MAX_SEGMENTS`.
        tenant: whose segments; None for everybody's.

    Attributes:
        num_compared: segments that were compared.
        num_segments: cached segments of all tenants, as the last call told.
    """

    def __init__(self, max_segments: int, tenant: str | None = None) -> None:
        self.num_compared = 0
        self.num_segments = 0
        self._max_segments = min(max_segments, MAX_SEGMENTS)
        self._tenant = tenant
        self._start: int | None = 0
        self._stride: int | None = None
        self._found: dict[int, Segment] = {}

    def next_call(self, source: SegmentSource) -> Future[SegmentPage] | None:
        """Make the next call; None if there is none.

        Raises:
            Draining, StepHangs: the engine takes no calls.
        """
        if self._start is None:
            return None
        return source.hottest(self._start, self._stride or 1, self._tenant, self._max_segments)

    def take(self, page: SegmentPage) -> None:
        """Keep what is hottest in the answer to the last call."""
        if self._stride is None:  # the first answer tells how many places there are
            self._stride = max(1, -(-(page.num_places - MAX_COMPARED) // ((MAX_CALLS - 1) * MAX_COMPARED)))
        self.num_compared += page.num_compared
        self.num_segments = page.num_segments
        self._start = page.next_place
        self._found.update((segment.place, segment) for segment in page.segments)

    def hottest(self) -> list[Segment]:
        """Return the hottest segments found, the hottest first, and a parent before its children."""
        segments = sorted(self._found.values(), key=lambda segment: (-segment.heat, segment.start_token))
        return segments[: self._max_segments]
