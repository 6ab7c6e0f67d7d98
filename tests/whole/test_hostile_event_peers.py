"""Readers of the event ports that try to take the memory and the time of `radixkv serve`."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from bench.hostile.trial import resident_mb
from radixkv.service.client import Client
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

ANY_FREE_PORT = "tcp://127.0.0.1:*"
NUM_WARM_UP_PROMPTS = 100  # more prompts than the pool has room for
SETTINGS = (
    f"events.zmq_endpoint={ANY_FREE_PORT}",
    f"events.replay_endpoint={ANY_FREE_PORT}",
    "cache.capacity_tokens=2048",
)
MAX_GROWTH_MB = 64
END_OF_REPLAY = b"\xff" * 8


def prompt_of(index: int) -> list[int]:
    """Return a prompt of 64 tokens, one block, that begins with its index."""
    return [1 + index % 200, 1 + index // 200, *[7] * 62]


class Subscriber(threading.Thread):
    """Reads events on a thread of its own until it is stopped.

    Attributes:
        numbers: the sequence numbers that were received.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._is_stopped = threading.Event()

    def run(self) -> None:
        with self._socket as subscriber:
            while not self._is_stopped.is_set():
                if subscriber.poll(100):
                    self.numbers.append(int.from_bytes(subscriber.recv_multipart()[1], "big"))

    def stop(self) -> None:
        self._is_stopped.set()
        self.join()


def request_replay(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first_number: int) -> list[int]:
    """Return the sequence numbers of a replay that begins with `first_number`."""
    with context.socket(zmq.DEALER) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        reader.connect(endpoint)
        reader.send_multipart([b"", first_number.to_bytes(8, "big")])
        numbers: list[int] = []
        while True:
            sequence = reader.recv_multipart()[2]
            if sequence == END_OF_REPLAY:
                return numbers
            numbers.append(int.from_bytes(sequence, "big"))


@contextlib.contextmanager
def run_hostile_peers(endpoints: tuple[str, str], num_peers: int) -> Iterator[None]:
    """Let hostile peers attack the ports of events and of replays until the context ends."""
    command = [sys.executable, "-m", "tests.events.hostile_peers", *endpoints, str(num_peers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # is written when the attack begins
        try:
            yield
        finally:
            attacker.kill()


@pytest.mark.parametrize(
    ("num_peers", "num_prompts"), [(12, 30), pytest.param(100, 500, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_hostile_peers_exhaust_no_memory_lose_no_events_and_delay_no_shutdown(
    tmp_path: Path, num_peers: int, num_prompts: int
) -> None:
    log = tmp_path / "log"
    options = [argument for setting in SETTINGS for argument in ("--set", setting)]
    with serving(*options, log=log) as (process, address), Client(address) as client, zmq.Context() as context:
        endpoints = re.search(r"events on (\S+), replays on (\S+)$", log.read_text(), re.MULTILINE)
        assert endpoints is not None
        for index in range(NUM_WARM_UP_PROMPTS):
            client.prefill(prompt_of(index))
        subscriber = Subscriber(context, endpoints[1])
        subscriber.start()
        idle_mb = peak_mb = resident_mb(process.pid)
        with run_hostile_peers((endpoints[1], endpoints[2]), num_peers):
            for index in range(num_prompts):
                client.prefill(prompt_of(NUM_WARM_UP_PROMPTS + index))
                peak_mb = max(peak_mb, resident_mb(process.pid))
            replayed_numbers = request_replay(context, endpoints[2], first_number=0)
            wait_until(lambda: bool(subscriber.numbers) and subscriber.numbers[-1] >= replayed_numbers[-1])
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        subscriber.stop()
    assert peak_mb - idle_mb <= MAX_GROWTH_MB
    assert replayed_numbers == [*range(NUM_WARM_UP_PROMPTS + num_prompts)]
    assert subscriber.numbers == [*range(subscriber.numbers[0], subscriber.numbers[-1] + 1)]
    assert len(subscriber.numbers) > num_prompts / 2
    assert log.read_text().count("malformed requests for replays") <= 2
