"""How calls share the requests that may be unfinished."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from radixkv.service.offline.request_slots import RequestSlots
from tests.patience import PATIENCE_S


def test_a_call_that_is_alone_takes_all_slots() -> None:
    slots = RequestSlots(3)
    with slots.call():
        assert [slots.take(num_own) for num_own in range(4)] == [True, True, True, False]


def test_a_call_that_has_none_waits_for_its_first_slot() -> None:
    slots = RequestSlots(2)
    has_begun = threading.Event()

    def other() -> bool:
        with slots.call():
            has_begun.set()
            return slots.take(0)

    with slots.call(), ThreadPoolExecutor(1) as threads:
        assert slots.take(0)
        assert slots.take(1)
        taken = threads.submit(other)
        assert has_begun.wait(PATIENCE_S)
        assert not taken.done()
        slots.release()
        assert taken.result(PATIENCE_S)


def test_calls_have_equal_shares() -> None:
    slots = RequestSlots(4)
    with slots.call():
        assert all(slots.take(num_own) for num_own in range(4))
        with slots.call():
            for _ in range(3):
                slots.release()
            assert slots.take(0)
            assert not slots.take(2), "two is the share of each"
            assert slots.take(1)
        assert slots.take(2), "the other call has ended"


def test_more_calls_than_slots_have_one_each_in_turn() -> None:
    slots = RequestSlots(2)

    def run(_: int) -> int:
        num_done = 0
        with slots.call():
            for _ in range(20):
                assert slots.take(0)
                num_done += 1
                slots.release()
        return num_done

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(8), timeout=PATIENCE_S)) == [20] * 8
