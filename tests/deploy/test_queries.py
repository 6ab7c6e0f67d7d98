"""The queries of the dashboard, of the alerts and of docs/METRICS.md can have results."""

from __future__ import annotations

import pytest

from .promql import labels_of
from .queries import ALERTS, EXAMPLES, PANELS, as_sent


def test_all_queries_are_found() -> None:
    assert {"Pool in use A", "Refusals B"} <= PANELS.keys()
    assert {"RadixkvGone", "RadixkvForgets"} <= ALERTS.keys()
    assert {"token hit rate per tenant", "mean number of decoding requests per step"} <= EXAMPLES.keys()


@pytest.mark.parametrize("query", [*PANELS.values(), *ALERTS.values(), *EXAMPLES.values()])
def test_a_query_can_have_a_result(query: str) -> None:
    assert labels_of(as_sent(query)) is not None


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (
            'rate(radixkv_step_tokens_sum{phase="decode"}[5m]) / rate(radixkv_step_seconds_count[5m])',
            "different labels",
        ),
        ('radixkv_blocks{state="free"} + radixkv_blocks{state="leased"}', "different labels"),
        ("sum(radixkv_blocks) / radixkv_pinned_blocks", "different labels"),
        ("sum by (tenant) (radixkv_blocks)", "no label tenant"),
        ('radixkv_up{state="free"}', "no label state"),
        ("radixkv_unknown > 0", "no metric radixkv_unknown"),
        ("rate(radixkv_step_seconds[5m])", "no metric radixkv_step_seconds"),
        ("histogram_quantile(0.5, rate(radixkv_step_seconds_sum[5m]))", "no label le"),
    ],
)
def test_a_query_that_never_has_a_result_is_detected(query: str, error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        labels_of(query)
