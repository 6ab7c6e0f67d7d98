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


def open_circuit(circuit: CircuitBreaker) -> None:
    assert [circuit.fail() for _ in range(3)] == [False, False, True]


def test_failures_in_a_row_open_the_circuit(circuit: CircuitBreaker) -> None:
    circuit.fail()
    circuit.fail()
    circuit.succeed()
    circuit.fail()
    circuit.fail()
    assert circuit.admit_call()
    assert circuit.fail()
    assert not circuit.admit_call()
    assert circuit.state is CircuitState.OPEN


def test_after_a_pause_one_trial_call_is_allowed(circuit: CircuitBreaker, clock: FakeClock) -> None:
    open_circuit(circuit)
    clock.now_s = 0.99
    assert not circuit.admit_call()
    clock.now_s = 1.0
    assert [circuit.admit_call() for _ in range(3)] == [True, False, False]
    assert circuit.state is CircuitState.TRYING
    assert circuit.succeed()
    assert [circuit.admit_call() for _ in range(3)] == [True, True, True]


def test_pauses_grow_up_to_the_longest_and_begin_again_after_an_answer(
    circuit: CircuitBreaker, clock: FakeClock
) -> None:
    open_circuit(circuit)
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now_s += pause_s - 0.25
        assert not circuit.admit_call()
        clock.now_s += 0.25
        assert circuit.admit_call()
        assert not circuit.fail()
    clock.now_s += 5.0
    assert circuit.admit_call()
    circuit.succeed()
    open_circuit(circuit)
    clock.now_s += 1.0
    assert circuit.admit_call()


def test_an_inconclusive_trial_call_is_followed_by_another(circuit: CircuitBreaker, clock: FakeClock) -> None:
    open_circuit(circuit)
    clock.now_s = 1.0
    assert circuit.admit_call()
    circuit.cancel()
    assert circuit.admit_call()
    assert not circuit.admit_call()


def test_results_of_earlier_calls_do_not_change_an_open_circuit(circuit: CircuitBreaker) -> None:
    open_circuit(circuit)
    assert not circuit.succeed()
    assert not circuit.fail()
    circuit.cancel()
    assert not circuit.admit_call()


def test_the_circuit_of_an_unknown_store_opens_after_one_failure(clock: FakeClock) -> None:
    circuit = CircuitBreaker(clock, is_known=False)
    assert circuit.fail()
    clock.now_s = 1.0
    assert circuit.admit_call()
    assert circuit.succeed()
    assert [circuit.fail() for _ in range(3)] == [False, False, True]
