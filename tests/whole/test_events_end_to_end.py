"""The events of `radixkv serve`, over gRPC and ZMQ, compared with an independent model of the cache."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import msgpack
import numpy as np
import pytest
import zmq
from xxhash import xxh3_64_intdigest

from radixkv.service.client import Client
from radixkv.v1.events_pb2 import EventBatch
from tests.forked_process import ForkedProcess
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving

ANY_FREE_PORT = "tcp://127.0.0.1:*"
FIRST_SEQUENCE_NUMBER, END_OF_REPLAY = bytes(8), b"\xff" * 8  # in the protocol of vLLM's events


@contextmanager
def run_server(log: Path, *settings: str) -> Iterator[tuple[ForkedProcess, str]]:
    """Run `radixkv serve`; yield the process and its address. Fails if the process does not exit with 0."""
    options = [argument for setting in settings for argument in ("--set", setting)]
    with serving(*options, log=log) as (process, address):
        yield process, address
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def hashes_of(prompt: list[int], block_size: int = 16) -> list[int]:
    """Return the hashes of the whole blocks of a prompt, as specified in the .proto file."""
    hashes, parent_hash = [], 0
    for start in range(0, len(prompt) - block_size + 1, block_size):
        block = np.array(prompt[start : start + block_size], "<u4").tobytes()
        parent_hash = xxh3_64_intdigest(parent_hash.to_bytes(8, "little") + block)
        hashes.append(parent_hash)
    return hashes


def apply(batch: EventBatch, salts: dict[int, str]) -> None:
    """Apply the events of a batch to what a subscriber knows: the salts of the cached blocks, by hash of the block."""
    for event in batch.events:
        kind = event.WhichOneof("event")
        if kind == "cleared":
            salts.clear()
        elif kind == "stored":
            assert len(event.stored.token_ids) == event.stored.block_size * len(event.stored.block_hashes)
            assert not event.stored.HasField("parent_block_hash") or event.stored.parent_block_hash in salts
            assert salts.keys().isdisjoint(event.stored.block_hashes)
            salts.update(dict.fromkeys(event.stored.block_hashes, event.stored.cache_salt))
        else:
            for block_hash in event.removed.block_hashes:
                del salts[block_hash]


def test_events_agree_with_the_cache(tmp_path: Path) -> None:
    prompts = [[*range(200)], [*range(100), *range(50)], [*range(70), *range(400, 440)]]
    with (
        run_server(tmp_path / "log", "cache.capacity_tokens=1024") as (process, address),
        Client(address) as client,
        closing(client.subscribe()) as batches,
    ):
        salts: dict[int, str] = {}
        first = next(batches)
        apply(first, salts)
        assert (len(salts), first.epoch) == (0, client.stats().epoch)
        for prompt in prompts:
            client.prefill(prompt)
        expected = {block_hash for prompt in prompts for block_hash in hashes_of(prompt)}
        while set(salts) != expected:
            apply(next(batches), salts)
        assert set(salts.values()) == {""}

        client.prefill(prompts[0], tenant="acme", salt="secret")
        while len(salts) < len(expected) + 12:  # the whole blocks of 200 tokens
            apply(next(batches), salts)
        (cache_salt,) = set(salts.values()) - {""}
        assert "acme" not in cache_salt
        assert "secret" not in cache_salt

        for start in range(1000, 5000, 40):  # more than the pool has room for
            client.prefill([*range(start % 400, start % 400 + 60), start % 500])
        client.purge(everything=True)
        numbers = [batch.sequence_number for batch in read_until_cleared(batches, salts)]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]

        process.terminate()
        with pytest.raises(grpc.RpcError) as ended:
            list(batches)
        # The server ends the stream, or cancels it if that takes more than a second, as on a busy machine.
        assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    # A restarted server does not have the events of the previous one.
    with (
        run_server(tmp_path / "log of the restarted server") as (_, address),
        Client(address) as client,
        pytest.raises(grpc.RpcError) as refused,
    ):
        next(client.subscribe(numbers[-1]))
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE


def read_until_cleared(batches: Iterator[EventBatch], salts: dict[int, str]) -> list[EventBatch]:
    """Return the batches up to the one that clears the cache; some event before it removes evicted blocks."""
    batches_read = []
    for batch in batches:
        apply(batch, salts)
        batches_read.append(batch)
        if batch.events[-1].WhichOneof("event") == "cleared":
            assert any(event.WhichOneof("event") == "removed" for each in batches_read for event in each.events)
            return batches_read
    raise AssertionError("the stream ended")


def test_events_are_published_and_replayed_over_zmq(tmp_path: Path) -> None:
    settings = (f"events.zmq_endpoint={ANY_FREE_PORT}", f"events.replay_endpoint={ANY_FREE_PORT}", "events.form=map")
    with run_server(tmp_path / "log", *settings) as (_, address), Client(address) as client:
        client.prefill(range(40))
        client.prefill(range(40), salt="secret")
        endpoint = re.search(r"events on \S+, replays on (\S+)$", (tmp_path / "log").read_text(), re.MULTILINE)
        assert endpoint is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.setsockopt(zmq.LINGER, 0)
            reader.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            reader.connect(endpoint[1])
            replayed: list[list[bytes]] = []  # frames of each message
            while len(replayed) < 2:
                reader.send_multipart([b"", FIRST_SEQUENCE_NUMBER])
                messages = iter(reader.recv_multipart, None)
                replayed = list(itertools.takewhile(lambda frames: frames[2] != END_OF_REPLAY, messages))
    # Over ZMQ, salted prompts are left out.
    (stored,) = [event for *_, payload in replayed for event in msgpack.unpackb(payload)[1]]
    assert stored["token_ids"] == [*range(32)]
    assert stored["block_hashes"] == hashes_of([*range(40)])


def test_an_invalid_endpoint_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--set", f"events.replay_endpoint={ANY_FREE_PORT}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert "events.replay_endpoint: requires events.zmq_endpoint" in done.stderr
