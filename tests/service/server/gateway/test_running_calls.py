"""Calls are found by request id, aborted while they run, and removed when they end."""

from radixkv.api.result import GenerationFuture
from radixkv.service.server.gateway.running_calls import RunningCalls


def test_an_abort_cancels_the_calls_of_its_ids_alone():
    calls = RunningCalls()
    with calls.running("a") as first, calls.running("a") as second, calls.running("b") as other:
        for call in (first, second, other):
            call.futures += [GenerationFuture(), GenerationFuture()]
        calls.abort(["unknown", "a"])
        assert [call.is_aborted for call in (first, second, other)] == [True, True, False]
        assert all(future.cancelled() for future in first.futures + second.futures)
        assert not any(future.cancelled() for future in other.futures)


def test_a_call_that_ends_cancels_what_it_has_not_answered():
    calls = RunningCalls()
    answered, unanswered = GenerationFuture(), GenerationFuture()
    answered.set_result(1)
    with calls.running("a") as call:
        call.futures += [answered, unanswered]
    assert (answered.result(), unanswered.cancelled(), call.is_aborted) == (1, True, False)


def test_nothing_is_kept_of_calls_that_ended():
    calls = RunningCalls()
    with calls.running("a"):
        with calls.running("a"), calls.running("b"):
            assert len(calls) == 3
        assert len(calls) == 1
    assert len(calls) == 0
    assert calls._calls == {}
    calls.abort(["a"])
