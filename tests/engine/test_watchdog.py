import threading
import time

from radixkv.engine.watchdog import Watchdog


def test_it_tells_once_for_each_step_that_hangs() -> None:
    told: list[float] = []
    has_told = threading.Event()

    def tell() -> None:
        told.append(time.monotonic())
        has_told.set()

    watchdog = Watchdog(0.05, tell)
    watchdog.start()
    for _ in range(20):
        watchdog.step_begins()
        assert not watchdog.is_hanging
        watchdog.step_ends()
    for hangs in (1, 2):
        has_told.clear()
        watchdog.step_begins()
        began_s = time.monotonic()
        assert has_told.wait(5)
        assert told[-1] - began_s >= 0.05
        assert watchdog.is_hanging
        time.sleep(0.05)
        watchdog.step_ends()
        assert not watchdog.is_hanging
        assert len(told) == hangs
    watchdog.stop()


def test_an_idle_engine_does_not_hang() -> None:
    told: list[None] = []
    watchdog = Watchdog(0.02, lambda: told.append(None))
    watchdog.start()
    time.sleep(0.1)
    assert told == []
    watchdog.stop()
