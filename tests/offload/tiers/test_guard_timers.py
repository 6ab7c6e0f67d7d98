from __future__ import annotations

import threading
from functools import partial

from radixkv.offload.tiers.guard import TimerThread
from tests.patience import PATIENCE_S


def test_timers_fire_in_the_order_of_their_due_times() -> None:
    clock = TimerThread()
    calls = []
    is_last = threading.Event()
    start_s = clock.now_s()
    for delay_s in (0.03, 0.01, 0.02):
        clock.call_later(delay_s, partial(calls.append, delay_s))
    clock.call_later(0.04, is_last.set)
    assert is_last.wait(PATIENCE_S)
    assert calls == [0.01, 0.02, 0.03]
    assert clock.now_s() - start_s >= 0.04
    clock.close()


def test_a_cancelled_timer_does_not_fire() -> None:
    clock = TimerThread()
    calls = []
    is_last = threading.Event()
    cancel = clock.call_later(0.01, partial(calls.append, 1))
    clock.call_later(0.02, is_last.set)
    cancel()
    cancel()
    assert is_last.wait(PATIENCE_S)
    assert calls == []
    clock.close()
