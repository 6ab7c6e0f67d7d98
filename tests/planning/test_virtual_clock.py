"""The clock of the simulations calls functions in order, each at its own time."""

from __future__ import annotations

from radixkv.planning.virtual_clock import VirtualClock


def test_each_function_is_called_at_its_own_time() -> None:
    clock, calls = VirtualClock(), list[tuple[str, float]]()
    clock.call_at(3.0, lambda: calls.append(("third", clock())))
    clock.call_at(2.0, lambda: calls.append(("first of two", clock())))
    clock.call_at(2.0, lambda: calls.append(("second of two", clock())))
    clock.call_at(9.0, lambda: calls.append(("late", clock())))
    clock.advance(5.0)
    assert calls == [("first of two", 2.0), ("second of two", 2.0), ("third", 3.0)]
    assert (clock.now_s, clock.next_s) == (5.0, 9.0)


def test_a_function_that_is_due_now_is_called_even_if_the_clock_is_not_advanced() -> None:
    clock, calls = VirtualClock(), list[float]()
    clock.advance(5.0)
    clock.call_at(5.0, lambda: calls.append(clock()))
    clock.advance(4.0)
    assert (calls, clock.now_s, clock.next_s) == ([5.0], 5.0, None)
