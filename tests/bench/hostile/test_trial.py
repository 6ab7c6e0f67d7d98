"""A short form of the attacks: nobody innocent is refused, memory stays bounded, and the server comes to rest."""

from __future__ import annotations

import asyncio
import sys

import pytest

from bench.hostile.attacks import ATTACKS
from bench.hostile.trial import measure
from bench.parts.server_process import ServerProcess

SECONDS = 0.5
MOST_MB = 800  # beyond idle; without bounds, large messages alone took 2,700


@pytest.fixture(scope="module")
def server():
    process = ServerProcess([sys.executable, "-m", "bench.parts.null_service", "engine"])
    with process as address:
        yield address, process.pid


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_refuses_nobody_else_and_leaves_nothing(server, name):
    address, pid = server
    row = asyncio.run(measure(address, pid, name, ATTACKS[name], SECONDS))
    assert row["beside"]["refusals"] == 0
    assert row["beside"]["calls"] == 10
    assert row["peak_mb"] < row["idle_mb"] + MOST_MB
    assert row["idle_after_s"] is not None
    assert set(row["seen"]) <= {"OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "connections", "calls"}
