"""Calls of other threads: each is run once, or cancelled."""

from __future__ import annotations

import threading

import pytest

from radixkv.engine.inbox import Inbox
from radixkv.errors import Draining


def test_functions_are_run_in_the_order_in_which_they_came() -> None:
    inbox, ran = Inbox(), []
    for number in range(3):
        inbox.put(lambda number=number: ran.append(number))
    call = inbox.call(lambda: ran.append("call") or "result")
    assert not inbox.is_empty
    inbox.run_all()
    assert (ran, call.result(0), inbox.is_empty) == ([0, 1, 2, "call"], "result", True)


def test_what_is_put_meanwhile_is_for_the_next_time() -> None:
    inbox, ran = Inbox(), []
    inbox.put(lambda: inbox.put(lambda: ran.append("later")))
    inbox.run_all()
    assert ran == []
    inbox.run_all()
    assert ran == ["later"]


def test_a_call_that_raises_fails_its_caller_alone() -> None:
    inbox = Inbox()
    broken, good = inbox.call(lambda: 1 / 0), inbox.call(lambda: 1)
    inbox.run_all()
    assert isinstance(broken.exception(0), ZeroDivisionError)
    assert good.result(0) == 1


def test_cancelled_calls_are_not_run() -> None:
    inbox, ran = Inbox(), []
    mine, other = inbox.call(lambda: ran.append("mine")), inbox.call(lambda: ran.append("other"))
    mine.cancel()
    inbox.run_all()
    assert ran == ["other"]
    waiting = inbox.call(lambda: ran.append("waiting"))
    inbox.cancel_calls()
    inbox.run_all()
    assert (waiting.cancelled(), other.cancelled(), ran) == (True, False, ["other"])


def test_calls_that_were_accepted_are_run_after_the_end_and_no_others_come() -> None:
    inbox = Inbox()
    accepted = inbox.call(lambda: 1)
    inbox.close()
    with pytest.raises(Draining):
        inbox.call(lambda: 2)
    inbox.run_all()
    assert accepted.result(0) == 1
    assert inbox.is_empty


def test_the_engine_wakes_up_for_a_function_and_when_time_is_up() -> None:
    inbox, ran = Inbox(), threading.Event()
    inbox.run_next(0.0)
    thread = threading.Thread(target=inbox.run_next, args=(None,))
    thread.start()
    inbox.put(ran.set)
    thread.join(10)
    assert ran.is_set()
    assert not thread.is_alive()
