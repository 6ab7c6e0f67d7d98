"""The counter of calls that are refused before the engine knows of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from radixkv.errors import DeadlineExceeded, InvalidRequest, PermissionDenied, QueueFull, RadixKVError, Unauthenticated

# By the first class that fits, so that callers can't make series.
REASONS: tuple[tuple[type[RadixKVError], str], ...] = (
    (Unauthenticated, "unauthenticated"),
    (PermissionDenied, "forbidden"),
    (InvalidRequest, "malformed"),
    (DeadlineExceeded, "slow"),
    (QueueFull, "busy"),
)
OTHER_REASON = "other"


class RefusedCalls:
    """Counts calls that their caller may not make, that do not come, or that find no room.

    All series are there from the start, so that rates see the first refusal too.

    Args:
        registry: of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "radixkv_refused_calls_total",
            "Calls that were refused before the engine knew of them, or whose answer found no room, by reason.",
            ["reason"],
            registry=registry,
        )
        self._by_reason = {reason: counter.labels(reason) for reason in (*dict(REASONS).values(), OTHER_REASON)}

    def count(self, error: RadixKVError) -> None:
        """Count a call by what it was refused with."""
        reason = next((reason for kind, reason in REASONS if isinstance(error, kind)), OTHER_REASON)
        self._by_reason[reason].inc()
