"""A short form of one attack: nobody innocent is refused, memory stays bounded, and the server comes to rest."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from bench.hostile.attacks.attack import Target
from bench.hostile.trial import measure, resident_mb
from bench.parts.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_servers")

MOST_MB = 800  # beyond idle; without bounds, large messages alone took 2,700


def test_an_attack_refuses_nobody_else_and_leaves_nothing():
    process = ServerProcess([sys.executable, "-m", "bench.parts.null_service", "engine"])
    with process as address:
        trial = asyncio.run(measure("large_packed", Target(address, 0.5), process.pid))
    assert (trial.beside.calls, trial.beside.refusals) == (10, 0)
    assert trial.peak_mb < trial.idle_mb + MOST_MB
    assert trial.idle_after_s is not None
    assert trial.seen.keys() == {"RESOURCE_EXHAUSTED"}


def test_the_memory_of_a_process_is_what_linux_says():
    assert resident_mb(os.getpid()) > 10
