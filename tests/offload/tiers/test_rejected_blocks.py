from __future__ import annotations

import logging

import pytest

from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks

CUT, UNAUTHENTIC = ObjectFault.CUT, ObjectFault.UNAUTHENTIC


def test_each_fault_is_logged_at_most_once_per_minute_with_the_number_of_new_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    rejected = RejectedBlocks("tier redis", lambda: now_s)
    with caplog.at_level(logging.WARNING):
        rejected.add([])
        rejected.add([UNAUTHENTIC, UNAUTHENTIC])
        rejected.add([UNAUTHENTIC, CUT])
        now_s += 59.0
        rejected.add([UNAUTHENTIC])
        now_s += 1.0
        rejected.add([UNAUTHENTIC])
    assert caplog.messages == [
        "tier redis: expected unmodified blocks of this model, got 2 that are unauthentic",
        "tier redis: expected unmodified blocks of this model, got one that is cut",
        "tier redis: expected unmodified blocks of this model, got 3 that are unauthentic",
    ]
    assert rejected.counts() == {UNAUTHENTIC: 5, CUT: 1}
