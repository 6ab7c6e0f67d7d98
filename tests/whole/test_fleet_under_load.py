"""Fleets of real processes under load: one that shrinks, and one with a replica that is slow."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from bench.fleet.processes import listener_of
from radixkv.service.client import Client
from tests.patience import PATIENCE_S, wait_until
from tests.service.fleet.fleet_process import running_fleet

pytestmark = pytest.mark.slow

NEW_TOKENS = 4


def prompt(number: int, num_tokens: int = 600) -> list[int]:
    return np.random.default_rng(number).integers(500, size=num_tokens).tolist()


def flags_of(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def ask(client: Client, number: int, new_tokens: int = NEW_TOKENS) -> int:
    """Generate from a numbered prompt and return the number of tokens. Raises if the call fails."""
    chunks = client.generate(prompt(number), max_new_tokens=new_tokens, ignore_eos=True)
    return sum(len(chunk.token_ids) for chunk in chunks)


def ask_all(client: Client, numbers: range, num_at_once: int) -> list[int]:
    with ThreadPoolExecutor(num_at_once) as threads:
        return list(threads.map(lambda number: ask(client, number), numbers))


def num_finished(address: str) -> int:
    with Client(address, timeout_s=PATIENCE_S) as replica:
        return replica.stats().requests.finished


@contextlib.contextmanager
def slowed(pid: int, share: float = 0.1, period_s: float = 0.5):
    """Slow a process down: let it run only for a share of the time."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait((1 - share) * period_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(share * period_s)

    slowing = threading.Thread(target=slow)
    slowing.start()
    try:
        yield
    finally:
        is_over.set()
        slowing.join()


def test_a_slow_replica_gets_fewer_requests_and_none_fails(tmp_path) -> None:
    with running_fleet("--replicas", "2", log=tmp_path / "log") as fleet, Client(fleet.address) as client:
        wait_until(lambda: client.route([1]).num_replicas == 2)
        assert ask_all(client, range(12), 2) == [NEW_TOKENS] * 12
        slow = client.route([1]).address
        other = client.route([1], avoid=[slow]).address
        with slowed(listener_of(slow, fleet.pids())):
            assert ask_all(client, range(100, 106), 2) == [NEW_TOKENS] * 6  # by which it is detected as slow
            before = num_finished(slow), num_finished(other)
            assert ask_all(client, range(200, 230), 2) == [NEW_TOKENS] * 30
            by_slow, by_other = num_finished(slow) - before[0], num_finished(other) - before[1]
        assert by_slow + by_other >= 30
        assert by_other >= 3 * by_slow, (by_slow, by_other)
        assert client.route([1]).num_replicas == 2, "slow, and not lost"


def test_a_fleet_that_scales_down_loses_no_call(tmp_path) -> None:
    settings = flags_of(
        "fleet.calls_per_replica=4",
        "fleet.grow_after_s=0",
        "fleet.shrink_after_s=1",
        f"server.drain_timeout_s={PATIENCE_S}",
    )
    with running_fleet("--replicas", "1:2", *settings, log=tmp_path / "log") as fleet, Client(fleet.address) as client:
        wait_until(lambda: client.route([1]).num_replicas == 1)
        numbers = itertools.count()

        def press_until(num_replicas: int, num_at_once: int, new_tokens: int) -> list[int]:
            """Keep making calls until there are this many replicas. Return the number of tokens of each call."""

            def press(_: int) -> list[int]:
                got = []
                while client.route([1]).num_replicas != num_replicas and time.monotonic() < end_s:
                    got.append(ask(client, next(numbers), new_tokens))
                return got

            end_s = time.monotonic() + PATIENCE_S
            with ThreadPoolExecutor(num_at_once) as threads:
                return [each for got in threads.map(press, range(num_at_once)) for each in got]

        assert set(press_until(2, num_at_once=12, new_tokens=4)) == {4}
        assert set(press_until(1, num_at_once=4, new_tokens=500)) == {500}, "also on the replica that left"
        assert client.route([1]).num_replicas == 1
