"""How simultaneous calls share the slots for unfinished requests."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from radixkv.service.offline.request_slots import RequestSlots
from tests.patience import PATIENCE_S


def test_a_single_call_acquires_all_slots() -> None:
    with RequestSlots(3).call() as call:
        assert [call.take() for _ in range(4)] == [True, True, True, False]
        assert call.num_taken == 3


def test_a_call_that_has_none_waits_for_its_first_slot() -> None:
    slots = RequestSlots(2)
    has_begun = threading.Event()

    def take_first_slot() -> bool:
        with slots.call() as call:
            has_begun.set()
            return call.take()

    with slots.call() as call, ThreadPoolExecutor(1) as threads:
        assert call.take()
        assert call.take()
        first_slot = threads.submit(take_first_slot)
        assert has_begun.wait(PATIENCE_S)
        assert not first_slot.done()
        call.release()
        assert first_slot.result(PATIENCE_S)


def test_calls_have_equal_shares() -> None:
    slots = RequestSlots(4)
    with slots.call() as first:
        assert all(first.take() for _ in range(4))
        with slots.call() as second:
            for _ in range(3):
                first.release()
            assert second.take()
            assert second.take()
            assert not second.take(), "two is the share of each"
            assert first.take()
        assert first.take(), "the other call has ended"


def test_a_call_releases_its_slots_however_it_ends() -> None:
    slots = RequestSlots(2)
    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt), slots.call() as call:
            assert call.take()
            assert call.take()
            raise KeyboardInterrupt
        assert slots._num_taken == 0
    with slots.call() as call:
        assert [call.take() for _ in range(3)] == [True, True, False]


def test_more_calls_than_slots_have_one_each_in_turn() -> None:
    slots = RequestSlots(2)

    def run(_: int) -> int:
        num_requests = 0
        with slots.call() as call:
            for _ in range(20):
                assert call.take()
                num_requests += 1
                call.release()
        return num_requests

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(8), timeout=PATIENCE_S)) == [20] * 8
