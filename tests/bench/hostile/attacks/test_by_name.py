"""A short form of each attack, on one server: all statuses are documented ones, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from bench.hostile.attacks.attack import LARGE_POOL, Target
from bench.hostile.attacks.by_name import ATTACKS
from bench.parts.server_process import ServerProcess, null_service_command
from radixkv.service.client import Client
from tests.free_port import free_port
from tests.service.serving import becomes_true

pytestmark = pytest.mark.usefixtures("forked_servers")

SETTINGS = (*LARGE_POOL, "engine.held_lease_ttl_s=0.5", "server.send_timeout_s=0.2")
DOCUMENTED_STATUSES = {"OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "CANCELLED", "status 0", "status 3", "status 8"}
HTTP_STATUSES = {"status 200", "status 400", "status 431", "closed"}
# Names of the numbers that attacks report besides statuses.
FIGURES = {"connections", "calls", "frames", "streams"}


@pytest.fixture(scope="module")
def http_address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def address(http_address):
    port = http_address.rpartition(":")[2]
    settings = (*SETTINGS, f"server.http_port={port}")
    with ServerProcess(null_service_command(settings)) as address:
        yield address


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_documented_statuses_and_leaves_nothing(address, http_address, name):
    attack = ATTACKS[name]
    target = Target(address, 0.2, 0.005, http_address if attack.is_http else "")

    async def run():
        if attack.prepare is not None:
            await attack.prepare(target)
        return await attack.run(target)

    observed = {}
    while not observed:  # on a busy machine, an attack of 0.2 s may end before a call has ended
        observed = asyncio.run(run())
    if attack.is_http:
        assert set(observed) <= HTTP_STATUSES | FIGURES
    else:
        assert set(observed) <= DOCUMENTED_STATUSES | FIGURES | {
            "status 12"
        }  # UNIMPLEMENTED, as raw connections report it
    with Client(address) as client:

        def is_idle():
            stats = client.stats()
            return not (stats.requests.running + stats.requests.waiting + stats.held_leases)

        async def becomes_idle():
            return await becomes_true(is_idle)

        assert asyncio.run(becomes_idle())


def test_the_attack_of_deep_retentions_splits_a_prompt_into_nodes(address):
    attack = ATTACKS["deep_retain"]
    assert attack.prepare is not None
    figures = asyncio.run(attack.prepare(Target(address, 0.2, 0.01)))
    assert figures["prepared OK"] == 41
    assert figures["whole_hit_ms"] > 0
    assert figures["nodes"] >= 2
