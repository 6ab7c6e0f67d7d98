"""Calls from other threads: each runs once or is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest

from radixkv.engine.inbox import CallerKind, CallOrigin, Inbox
from radixkv.errors import Draining, QueueFull
from tests.fakes import FakeClock

ACME, OTHER = CallOrigin(CallerKind.TENANT, "acme"), CallOrigin(CallerKind.TENANT, "other")


def make_inbox(max_calls: int = 100, max_tenant_calls: int = 100) -> Inbox:
    return Inbox(max_calls, max_tenant_calls, FakeClock())


def test_functions_run_in_order() -> None:
    inbox, ran = make_inbox(), []
    for number in range(3):
        inbox.put(lambda number=number: ran.append(number))
    call = inbox.call(lambda: ran.append("call") or "result")
    assert not inbox.is_empty
    inbox.run_all()
    assert (ran, call.result(0), inbox.is_empty) == ([0, 1, 2, "call"], "result", True)


def test_functions_that_are_put_while_others_run_wait_for_the_next_time() -> None:
    inbox, ran = make_inbox(), []
    inbox.put(lambda: inbox.put(lambda: ran.append("later")))
    inbox.run_all()
    assert ran == []
    inbox.run_all()
    assert ran == ["later"]


def test_a_call_that_raises_fails_its_caller_alone() -> None:
    inbox = make_inbox()
    broken, good = inbox.call(lambda: 1 / 0), inbox.call(lambda: 1)
    inbox.run_all()
    assert isinstance(broken.exception(0), ZeroDivisionError)
    assert good.result(0) == 1


def test_cancelled_calls_are_not_run() -> None:
    inbox, ran = make_inbox(), []
    mine, other = inbox.call(lambda: ran.append("mine")), inbox.call(lambda: ran.append("other"))
    mine.cancel()
    inbox.run_all()
    assert ran == ["other"]
    waiting = inbox.call(lambda: ran.append("waiting"))
    inbox.cancel_calls()
    inbox.run_all()
    assert (waiting.cancelled(), other.cancelled(), ran) == (True, False, ["other"])


def test_accepted_calls_run_after_the_inbox_is_closed_and_no_others_are_accepted() -> None:
    inbox = make_inbox()
    accepted = inbox.call(lambda: 1)
    inbox.close()
    with pytest.raises(Draining):
        inbox.call(lambda: 2)
    inbox.run_all()
    assert accepted.result(0) == 1
    assert inbox.is_empty


def test_the_engine_wakes_up_for_a_function_and_when_time_is_up() -> None:
    inbox, ran = make_inbox(), threading.Event()
    inbox.run_next(0.0)
    thread = threading.Thread(target=inbox.run_next, args=(None,))
    thread.start()
    inbox.put(ran.set)
    thread.join(10)
    assert ran.is_set()
    assert not thread.is_alive()


def test_the_engine_wakes_up_for_a_call_and_does_not_wait_while_calls_wait() -> None:
    inbox = make_inbox()
    thread = threading.Thread(target=inbox.run_next, args=(None,))
    thread.start()
    call = inbox.call(lambda: 1)
    thread.join(10)
    assert not thread.is_alive()
    inbox.run_next(None)
    inbox.run_some()
    assert call.result(0) == 1


def make_work(clock: FakeClock, ran: list[str], name: str, seconds: float = 0.001) -> Callable[[], None]:
    """Return a function that takes some seconds of the clock, and adds its name to `ran`."""

    def work() -> None:
        clock.now_s += seconds
        ran.append(name)

    return work


def test_all_functions_and_calls_for_a_short_time_run_between_two_steps() -> None:
    clock, ran = FakeClock(), []
    inbox = Inbox(100, 100, clock)
    for number in range(5):
        inbox.call(make_work(clock, ran, str(number)), ACME)
        inbox.put(make_work(clock, ran, "request"))
    inbox.run_some()
    assert ran == ["request"] * 5 + ["0", "1"], "two calls of 1 ms each fit into 2 ms"
    assert not inbox.is_empty
    inbox.run_some()
    inbox.run_some()
    assert ran[-3:] == ["2", "3", "4"]
    assert inbox.is_empty


def test_a_tenants_call_waits_for_one_of_many_calls_of_another_and_not_for_all() -> None:
    clock, ran = FakeClock(), []
    inbox = Inbox(10_000, 10_000, clock)
    for _ in range(9_999):
        inbox.call(make_work(clock, ran, "crowd"), ACME)
    inbox.call(make_work(clock, ran, "mine"), OTHER)
    inbox.run_some()
    assert ran == ["crowd", "mine"]


def test_kinds_of_callers_take_turns() -> None:
    inbox, ran = make_inbox(), []
    for name in ("first", "second"):
        for origin in (ACME, OTHER, CallOrigin(CallerKind.ADMIN, "acme"), CallOrigin()):
            inbox.call(lambda name=name, origin=origin: ran.append((origin.kind.name, origin.tenant, name)), origin)
    inbox.run_some()
    assert [kind for kind, _, _ in ran] == ["SERVICE", "ADMIN", "TENANT"] * 2 + ["TENANT"] * 2
    assert [tenant for kind, tenant, _ in ran if kind == "TENANT"] == ["acme", "other"] * 2


def test_too_many_calls_of_one_kind_of_caller_are_refused_and_those_of_others_are_not() -> None:
    inbox = make_inbox(max_calls=3, max_tenant_calls=2)
    waiting = [inbox.call(lambda: 1, OTHER)]
    inbox.call(lambda: 1, CallOrigin(CallerKind.TENANT, "second"))
    waiting += [inbox.call(lambda: 1, ACME)]
    with pytest.raises(QueueFull, match="expected fewer than 3 waiting calls, got 3") as refusal:
        inbox.call(lambda: 1, CallOrigin(CallerKind.TENANT, "third"))
    assert 0 < refusal.value.retry_after_s < 1
    admin_call, service_call = inbox.call(lambda: 1, CallOrigin(CallerKind.ADMIN, "acme")), inbox.call(lambda: 1)
    for _ in range(5):
        inbox.put(lambda: None)
    inbox.run_some()
    assert [call.result(0) for call in (*waiting, admin_call, service_call)] == [1] * 4
    assert inbox.call(lambda: 1, ACME)


def test_a_call_that_makes_room_for_another_tenant_is_refused_and_earlier_ones_run() -> None:
    inbox, ran = make_inbox(max_calls=4, max_tenant_calls=4), []
    crowd = [inbox.call(lambda number=number: ran.append(number), ACME) for number in range(4)]
    fifth = inbox.call(lambda: ran.append("other"), OTHER)
    refusal = crowd[3].exception(0)
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_s > 0
    assert "acme" not in str(refusal)
    crowd[2].cancel()
    sixth = inbox.call(lambda: ran.append("other"), OTHER)  # removes `crowd[2]`, which was cancelled already
    inbox.run_all()
    assert ran == [0, "other", 1, "other"]
    assert (fifth.done(), sixth.done(), inbox.is_empty) == (True, True, True)


def test_calls_may_take_longer_after_a_long_step_and_not_after_a_long_idle_time() -> None:
    clock, ran = FakeClock(), []
    inbox = Inbox(100, 100, clock)
    for number in range(30):
        inbox.call(make_work(clock, ran, str(number), 0.0011), ACME)
    clock.now_s += 10.0
    inbox.run_next(None)
    inbox.run_some()
    assert len(ran) == 2, "calls begin within the first 2 ms, since no step took long"
    clock.now_s += 0.2
    inbox.run_some()
    assert len(ran) == 2 + 10, "calls begin within 10 ms, 5 % of the last step"
    clock.now_s += 0.001
    inbox.run_some()
    assert len(ran) == 12 + 2, "calls begin within 2 ms again"


def test_a_call_runs_after_every_function_that_was_put_before_it() -> None:
    inbox, ran = make_inbox(), []

    def put_request_and_purge() -> None:  # like another thread while the engine runs calls
        inbox.put(lambda: ran.append("request"))
        inbox.call(lambda: ran.append("purge"), CallOrigin(CallerKind.ADMIN))

    inbox.call(put_request_and_purge, ACME)
    inbox.run_some()
    assert ran == ["request", "purge"]


def run_slices(ran: list[str], name: str, num_slices: int) -> Generator[None, None, str]:
    """Add a name to `ran` in each of several slices, and return the name."""
    for _ in range(num_slices):
        ran.append(name)
        yield
    return name


def test_other_calls_have_their_turns_between_the_slices_of_a_call() -> None:
    inbox, ran = make_inbox(), []
    sliced = inbox.call(lambda: run_slices(ran, "slice", 3), ACME)
    after = inbox.call(lambda: ran.append("after"), ACME)
    other = inbox.call(lambda: ran.append("other"), OTHER)
    inbox.run_some()
    assert ran == ["slice", "other", "slice", "slice", "after"]
    assert (sliced.result(0), after.done(), other.done()) == ("slice", True, True)


def test_a_call_that_has_started_is_not_cancelled() -> None:
    clock, ran = FakeClock(), []
    inbox = Inbox(10, 10, clock)
    sliced = inbox.call(lambda: run_slices(ran, "slice", 2), ACME)
    clock.now_s += 1.0
    slow = make_work(clock, ran, "slow", 1.0)
    inbox.call(slow, CallOrigin(CallerKind.ADMIN))
    inbox.run_some()
    inbox.run_some()
    inbox.cancel_calls()
    inbox.run_all()
    assert sliced.result(0) == "slice"
    assert ran.count("slice") == 2


def test_abandoned_calls_are_cancelled_or_fail_with_the_reason() -> None:
    def slices() -> Generator[None, None, None]:
        inbox.put(lambda: 1 / 0)
        yield

    inbox = make_inbox()
    begun, waiting = inbox.call(slices), inbox.call(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        inbox.run_all()
    inbox.close()
    inbox.abandon(Draining("stopped"))
    assert isinstance(begun.exception(0), Draining)
    assert waiting.cancelled()
