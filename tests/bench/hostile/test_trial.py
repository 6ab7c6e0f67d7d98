"""A short form of one attack: no well-behaved call is refused, memory stays bounded, and the server becomes idle.

Attackers have normal priority here: with low priority, a busy machine could leave them no CPU time for minutes.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from bench.hostile.attacks.attack import Target
from bench.hostile.trial import measure, resident_mb
from bench.parts.server_process import ServerProcess, null_service_command
from radixkv.service.client import Client

pytestmark = pytest.mark.usefixtures("forked_servers")

MAX_GROWTH_MB = 800  # from the memory of an idle server; without bounds, large messages alone took 2,700 MB


@pytest.mark.long
def test_an_attack_causes_no_refusals_of_another_client_and_leaves_nothing():
    process = ServerProcess(null_service_command(()))
    with process as address:
        trial = asyncio.run(measure("large_packed", Target(address, 0.5), process.pid, has_low_priority=False))
    assert (trial.under_attack.calls, trial.under_attack.refusals) == (10, 0)
    assert trial.peak_mb < trial.idle_mb + MAX_GROWTH_MB
    assert trial.idle_after_s is not None
    assert trial.observed.keys() == {"RESOURCE_EXHAUSTED"}


@pytest.mark.long
def test_an_attack_can_be_sent_to_a_server_that_the_well_behaved_client_does_not_use():
    processes = [ServerProcess(null_service_command(())) for _ in range(2)]
    with processes[0] as address, processes[1] as attacked_address:
        targets = Target(address, 0.5), processes[0].pid, Target(attacked_address, 0.5)
        trial = asyncio.run(measure("large_unpacked", *targets, has_low_priority=False))
        with Client(address) as client, Client(attacked_address) as client_of_attacked:
            tenants = {each.tenant for each in client.stats().tenants}
            tenants_of_attacked = {each.tenant for each in client_of_attacked.stats().tenants}
    assert trial.observed["OK"] > 0
    assert "well-behaved" in tenants - tenants_of_attacked
    assert tenants_of_attacked - tenants


def test_the_memory_of_a_process_is_measured():
    assert resident_mb(os.getpid()) > 10
