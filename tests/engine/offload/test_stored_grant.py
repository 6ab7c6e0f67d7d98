"""A caller is told how much of a prompt is kept, on the device and in stores."""

from __future__ import annotations

from radixkv.api.retention import Grant, Retention
from radixkv.namespace import Namespace
from tests.fake_runner import tokens

from .tiered_bench import TieredBench

NAMESPACE = Namespace("fake")
PROMPT = range(13)  # three whole blocks and a token


def emptied(bench: TieredBench) -> TieredBench:
    """A bench whose prompt was computed and evicted."""
    bench.prefill(PROMPT)
    bench.evict(4)
    return bench


def test_a_prompt_is_retained_on_the_device_and_in_stores() -> None:
    bench = TieredBench(num_blocks=6, host=8)
    bench.prefill(PROMPT)
    bench.evict(3)  # of four blocks
    grant = bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90, start=2, end=10)).grant
    assert grant == Grant(8, 0, 0), "two tokens on the device, six in two stored blocks"
    grant = bench.core.retain(NAMESPACE, tokens(range(4)), Retention(90)).grant
    assert grant == Grant(4, 0, 0)


def test_what_may_not_be_retained_of_what_is_stored_is_told() -> None:
    bench = TieredBench(host=8)
    bench.elsewhere.shelves["host"].retained_share = 0.25
    bench = emptied(bench)
    grant = bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90)).grant
    assert grant == Grant(8, 4, 1)


def test_what_shared_stores_have_can_not_be_retained() -> None:
    bench = emptied(TieredBench(redis=100))
    assert bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90)).grant == Grant(0, 0, 13)
