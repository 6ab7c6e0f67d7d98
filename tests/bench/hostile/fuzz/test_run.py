import asyncio
import sys

import pytest

from bench.hostile.fuzz.run import FuzzResult, fuzz
from bench.parts.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_mutated_messages_and_raw_bytes_get_documented_statuses_only():
    process = ServerProcess([sys.executable, "-m", "bench.parts.null_service", "engine"])
    with process as address:
        fuzzed = asyncio.run(fuzz(address, process.pid, 600, 100, 5))
    assert fuzzed.undocumented == []
    assert sum(fuzzed.statuses.values()) == 600
    assert sum(fuzzed.raw.values()) == 100
    assert {"OK", "INVALID_ARGUMENT"} <= fuzzed.statuses.keys()
    assert fuzzed.served >= 2


def test_a_wrong_status_is_reported():
    assert FuzzResult({"OK": 1, "INTERNAL": 1}, {"2": 1}, 1, 1.0, 1.0).undocumented == ["2", "INTERNAL"]
