import asyncio
from pathlib import Path

import pytest

from bench.hostile.fuzz import raw_bytes
from bench.hostile.fuzz.__main__ import FuzzResult, fuzz, make_server
from bench.hostile.fuzz.mutations import METHODS, SEEDS
from radixkv.v1.prefill_pb2 import PrefillRequest

PROTO = Path(__file__).parents[4] / "proto"

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_all_methods_but_drain_are_fuzzed_with_messages_of_their_type():
    assert len(METHODS) == sum(path.read_text().count("\n  rpc ") for path in PROTO.rglob("*.proto"))
    assert METHODS.keys() - SEEDS.keys() == {"/radixkv.v1.CacheService/Drain"}
    assert {path: each.DESCRIPTOR.full_name for path, each in SEEDS.items()} == {
        path: METHODS[path].input_type.full_name for path in SEEDS
    }


def test_raw_calls_that_are_cut_or_flipped_begin_as_a_valid_call():
    is_compressed, length, message = raw_bytes._MESSAGE[0], raw_bytes._MESSAGE[1:5], raw_bytes._MESSAGE[5:]
    assert (is_compressed, int.from_bytes(length, "big")) == (0, len(message))
    assert PrefillRequest.FromString(message).token_ids == [1]


def test_mutated_messages_and_raw_bytes_get_documented_statuses_only():
    process = make_server()
    with process as address:
        fuzzed = asyncio.run(fuzz(address, process.pid, 1200, 100, 5))
    assert fuzzed.undocumented == []
    assert sum(fuzzed.statuses.values()) == 1200
    assert sum(fuzzed.raw.values()) == 100
    assert {"OK", "INVALID_ARGUMENT"} <= fuzzed.statuses.keys()
    assert fuzzed.served >= 2, "well-formed calls between the others were answered"


def test_a_wrong_status_is_reported():
    assert FuzzResult({"OK": 1, "INTERNAL": 1}, {"2": 1}, 1, 1.0, 1.0).undocumented == ["2", "INTERNAL"]
