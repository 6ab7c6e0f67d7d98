"""Faults that are planted in the traffic of agents are found, and the reported costs are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.doctor import run_doctor, run_profiler
from bench.parts.planted_traffic import FAULTS, Fault, Traffic
from radixkv.doctor.causes import MissCause
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.text.tokenizer import Tokenizer

PLANTED_SHARE = 0.3  # of the requests


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    directory = Path(tmp_path_factory.mktemp("tiny"))
    write_tiny_files(directory)
    return Traffic(Tokenizer.load(directory), num_sessions=6, num_turns=7, seed=4)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("has_sessions", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_and_its_cost_are_found(traffic: Traffic, fault: Fault, has_sessions: bool) -> None:
    result = run_doctor(traffic, fault, PLANTED_SHARE, has_sessions=has_sessions)
    assert result.planted >= 5
    assert result.found == result.planted
    assert result.false == 0
    assert result.gain_error <= 0.05


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("has_sessions", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_running_server_finds_a_planted_fault(traffic: Traffic, fault: Fault, has_sessions: bool) -> None:
    result = run_profiler(traffic, fault, PLANTED_SHARE, has_sessions=has_sessions)
    assert result.planted >= 5
    if fault.cause is MissCause.TENANT_CHANGED:  # what other tenants have cached is not reported
        assert (result.found, result.false, result.saved_tokens) == (0, 0, 0)
        return
    assert result.found >= 0.9 * result.planted
    assert result.false <= 0.02 * result.requests
    if fault.cause is not MissCause.COMPACTED:  # tokens that a summary replaces count as computed for a new prompt
        assert result.gain_error <= 0.1


def test_traffic_without_faults_has_no_causes(traffic: Traffic) -> None:
    result = run_doctor(traffic, FAULTS[0], 0.0)
    assert (result.planted, result.false, result.lost_tokens, result.saved_tokens) == (0, 0, 0, 0)
