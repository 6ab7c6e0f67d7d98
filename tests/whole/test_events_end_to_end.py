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

ANYWHERE = "tcp://127.0.0.1:*"


@contextmanager
def served(log: Path, *settings: str) -> Iterator[tuple[ForkedProcess, str]]:
    """Run `radixkv serve`; yield the process and its address."""
    options = [part for setting in settings for part in ("--set", setting)]
    with serving(*options, log=log) as (process, address):
        yield process, address
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def hashes_of(prompt: list[int], size: int = 16) -> list[int]:
    """Return the hashes of the whole blocks of a prompt, as specified in the .proto file."""
    hashes, parent = [], 0
    for start in range(0, len(prompt) - size + 1, size):
        block = np.array(prompt[start : start + size], "<u4").tobytes()
        parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + block)
        hashes.append(parent)
    return hashes


def apply(batch: EventBatch, known: dict[int, str]) -> None:
    """Track the blocks that a subscriber knows, with their salts."""
    for event in batch.events:
        kind = event.WhichOneof("event")
        if kind == "cleared":
            known.clear()
        elif kind == "stored":
            assert len(event.stored.token_ids) == event.stored.block_size * len(event.stored.block_hashes)
            assert not event.stored.HasField("parent_block_hash") or event.stored.parent_block_hash in known
            assert known.keys().isdisjoint(event.stored.block_hashes)
            known.update(dict.fromkeys(event.stored.block_hashes, event.stored.cache_salt))
        else:
            for block in event.removed.block_hashes:
                del known[block]


def test_events_agree_with_the_cache(tmp_path: Path) -> None:
    prompts = [[*range(200)], [*range(100), *range(50)], [*range(70), *range(400, 440)]]
    with (
        served(tmp_path / "log", "cache.capacity_tokens=1024") as (process, address),
        Client(address) as client,
        closing(client.subscribe()) as batches,
    ):
        known: dict[int, str] = {}
        first = next(batches)
        apply(first, known)
        assert (len(known), first.epoch) == (0, client.stats().epoch)
        for prompt in prompts:
            client.prefill(prompt)
        expected = {block for prompt in prompts for block in hashes_of(prompt)}
        while set(known) != expected:
            apply(next(batches), known)
        assert set(known.values()) == {""}
        client.prefill(prompts[0], tenant="acme", salt="secret")
        while len(known) < len(expected) + 12:
            apply(next(batches), known)
        salts = set(known.values()) - {""}
        assert len(salts) == 1
        assert not any(name in salt for salt in salts for name in ("acme", "secret"))
        for start in range(1000, 5000, 40):  # until much is evicted
            client.prefill([*range(start % 400, start % 400 + 60), start % 500])
        client.purge(everything=True)
        numbers = [batch.sequence_number for batch in read_until_clear(batches, known)]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        process.terminate()
        with pytest.raises(grpc.RpcError) as ended:
            list(batches)
        # The server cancels what has not ended a second after the last answer, which a busy machine may take.
        assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with (
        served(tmp_path / "again") as (_, address),
        Client(address) as client,
        pytest.raises(grpc.RpcError) as refused,
    ):
        next(client.subscribe(numbers[-1]))
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE


def read_until_clear(batches: Iterator[EventBatch], known: dict[int, str]) -> list[EventBatch]:
    read = []
    for batch in batches:
        apply(batch, known)
        read.append(batch)
        if batch.events[-1].WhichOneof("event") == "cleared":
            assert any(event.WhichOneof("event") == "removed" for each in read for event in each.events)
            return read
    raise AssertionError("the stream ended")


def test_events_are_published_and_replayed_over_zmq(tmp_path: Path) -> None:
    settings = (f"events.zmq_endpoint={ANYWHERE}", f"events.replay_endpoint={ANYWHERE}", "events.form=map")
    with served(tmp_path / "log", *settings) as (_, address), Client(address) as client:
        client.prefill(range(40))
        client.prefill(range(40), salt="secret")
        endpoint = re.search(r"events on \S+, replays on (\S+)$", (tmp_path / "log").read_text(), re.MULTILINE)
        assert endpoint is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.setsockopt(zmq.LINGER, 0)
            reader.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            reader.connect(endpoint[1])
            answers: list[list[bytes]] = []
            while len(answers) < 2:
                reader.send_multipart([b"", bytes(8)])
                messages = iter(reader.recv_multipart, None)
                answers = list(itertools.takewhile(lambda frames: frames[2] != b"\xff" * 8, messages))
    (plain,) = [
        event for *_, payload in answers for event in msgpack.unpackb(payload)[1]
    ]  # the salted prompt is left out
    assert plain["token_ids"] == [*range(32)]
    assert plain["block_hashes"] == hashes_of([*range(40)])


def test_an_invalid_endpoint_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--set", f"events.replay_endpoint={ANYWHERE}"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "events.replay_endpoint: requires events.zmq_endpoint" in done.stderr
