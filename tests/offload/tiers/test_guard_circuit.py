from __future__ import annotations

import pytest

from radixkv.offload.tiers.guard import CircuitBreaker, CircuitState
from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def circuit(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(clock, max_failures=3, first_pause_s=1.0, max_pause_s=5.0)


def begin(circuit: CircuitBreaker) -> int:
    """Begin a call, which must be admitted. Returns the number with which it must end."""
    num_trials = circuit.admit_call()
    assert num_trials is not None
    return num_trials


def is_refused(circuit: CircuitBreaker) -> bool:
    return circuit.admit_call() is None


def open_circuit(circuit: CircuitBreaker) -> None:
    assert [circuit.fail(begin(circuit)) for _ in range(3)] == [False, False, True]


def test_failures_in_a_row_open_the_circuit(circuit: CircuitBreaker) -> None:
    circuit.fail(begin(circuit))
    circuit.fail(begin(circuit))
    circuit.succeed(begin(circuit))
    circuit.fail(begin(circuit))
    circuit.fail(begin(circuit))
    assert circuit.fail(begin(circuit))
    assert is_refused(circuit)
    assert circuit.state is CircuitState.OPEN


def test_after_a_pause_one_trial_call_is_allowed(circuit: CircuitBreaker, clock: FakeClock) -> None:
    open_circuit(circuit)
    clock.now_s = 0.99
    assert is_refused(circuit)
    clock.now_s = 1.0
    trial = begin(circuit)
    assert is_refused(circuit)
    assert circuit.state is CircuitState.TRYING
    assert circuit.succeed(trial)
    assert [is_refused(circuit) for _ in range(3)] == [False, False, False]


def test_pauses_grow_up_to_the_longest_and_begin_again_after_an_answer(
    circuit: CircuitBreaker, clock: FakeClock
) -> None:
    open_circuit(circuit)
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now_s += pause_s - 0.25
        assert is_refused(circuit)
        clock.now_s += 0.25
        assert not circuit.fail(begin(circuit))
    clock.now_s += 5.0
    circuit.succeed(begin(circuit))
    open_circuit(circuit)
    clock.now_s += 1.0
    begin(circuit)


def test_an_inconclusive_trial_call_is_followed_by_another(circuit: CircuitBreaker, clock: FakeClock) -> None:
    open_circuit(circuit)
    clock.now_s = 1.0
    circuit.cancel(begin(circuit))
    begin(circuit)
    assert is_refused(circuit)


def test_results_of_earlier_calls_do_not_change_an_open_circuit(circuit: CircuitBreaker) -> None:
    earlier = begin(circuit)
    open_circuit(circuit)
    assert not circuit.succeed(earlier)
    assert not circuit.fail(earlier)
    circuit.cancel(earlier)
    assert is_refused(circuit)


def test_results_of_earlier_calls_are_not_those_of_the_trial_call(circuit: CircuitBreaker, clock: FakeClock) -> None:
    earlier = begin(circuit)
    open_circuit(circuit)
    clock.now_s = 1.0
    trial = begin(circuit)
    assert not circuit.fail(earlier)
    assert not circuit.succeed(earlier)
    circuit.cancel(earlier)
    assert circuit.state is CircuitState.TRYING
    assert is_refused(circuit), "the trial call has not ended"
    circuit.fail(trial)
    clock.now_s = 3.0
    trial = begin(circuit)  # the pause was doubled once
    assert circuit.succeed(trial)
    assert [circuit.fail(earlier) for _ in range(3)] == [False, False, False], "the store has answered since"


def test_the_circuit_of_an_unknown_store_opens_after_one_failure(clock: FakeClock) -> None:
    circuit = CircuitBreaker(clock, is_known=False)
    assert circuit.fail(begin(circuit))
    clock.now_s = 1.0
    assert circuit.succeed(begin(circuit))
    assert [circuit.fail(begin(circuit)) for _ in range(3)] == [False, False, True]
