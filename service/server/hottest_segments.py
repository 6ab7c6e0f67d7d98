"""Finds the hottest segments of a cache of any size with a bounded number of short engine calls."""

from __future__ import annotations

from concurrent.futures import Future

from radixkv.api.segments import Segment, SegmentPage
from radixkv.cache.segment_index import MAX_COMPARED, MAX_SEGMENTS
from radixkv.cache.segment_source import SegmentSource

MAX_CALLS = 32  # engine calls for one result


class HottestSegments:
    """Compares the segments of a cache, one engine call at a time, and keeps the hottest ones.

        while (future := hottest.next_call(engine.segments)) is not None:
            hottest.add(future.result())

    With up to `MAX_CALLS * MAX_COMPARED` positions, 16,384, all segments are compared and the result is exact. In a
    larger cache every n-th position is compared, and the ancestors of the segments found there. A segment that is hot
    because many others continue it is likely to be found, but a hot leaf may be missed.

    Args:
        max_segments: segments to keep, at most `MAX_SEGMENTS`.
        tenant: the tenant whose segments are compared; None for all tenants.

    Attributes:
        num_compared: segments that were compared.
        num_segments: cached segments of all tenants, as of the last call.
    """

    def __init__(self, max_segments: int, tenant: str | None = None) -> None:
        self.num_compared = 0
        self.num_segments = 0
        self._max_segments = min(max_segments, MAX_SEGMENTS)
        self._tenant = tenant
        self._start: int | None = 0
        self._stride: int | None = None
        self._segments: dict[int, Segment] = {}

    def next_call(self, source: SegmentSource) -> Future[SegmentPage] | None:
        """Start the next engine call and return its future; None if there is none left.

        Raises:
            Draining, StepHangs: the engine accepts no calls.
        """
        if self._start is None:
            return None
        return source.hottest(self._start, self._stride or 1, self._tenant, self._max_segments)

    def add(self, page: SegmentPage) -> None:
        """Add the result of the last call."""
        if self._stride is None:  # the first result shows how many positions there are
            # The first call has compared `MAX_COMPARED` positions. The stride divides the others among the other calls.
            num_further = page.end_number - MAX_COMPARED
            max_further_compared = (MAX_CALLS - 1) * MAX_COMPARED
            self._stride = max(1, -(-num_further // max_further_compared))  # rounded up
        self.num_compared += page.num_compared
        self.num_segments = page.num_segments
        self._start = page.next_start
        self._segments.update((segment.number, segment) for segment in page.segments)

    def result(self) -> list[Segment]:
        """Return the hottest segments that were found, in descending order of heat, parents before their children."""
        segments = sorted(self._segments.values(), key=lambda segment: (-segment.heat, segment.start_token))
        return segments[: self._max_segments]
