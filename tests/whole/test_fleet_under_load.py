"""Fleets of real processes under load: one with a slow replica, and one that shrinks."""

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
    return [argument for setting in settings for argument in ("--set", setting)]


def generate(client: Client, number: int, new_tokens: int = NEW_TOKENS) -> int:
    """Generate from a numbered prompt and return the number of tokens. Raises if the call fails."""
    chunks = client.generate(prompt(number), max_new_tokens=new_tokens, ignore_eos=True)
    return sum(len(chunk.token_ids) for chunk in chunks)


def generate_all(client: Client, numbers: range, num_at_once: int) -> list[int]:
    """Generate from numbered prompts, several at once; return the number of tokens of each."""
    with ThreadPoolExecutor(num_at_once) as threads:
        return list(threads.map(lambda number: generate(client, number), numbers))


def num_finished(address: str) -> int:
    """Return how many requests a replica has finished."""
    with Client(address, timeout_s=PATIENCE_S) as replica:
        return replica.stats().requests.finished


@contextlib.contextmanager
def slow_down(pid: int, running_share: float = 0.1, period_s: float = 0.5):
    """Let a process run only for a share of each period."""
    is_over = threading.Event()

    def stop_and_continue() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait((1 - running_share) * period_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_share * period_s)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_slow_replica_gets_fewer_requests_and_none_fails(tmp_path) -> None:
    with running_fleet("--replicas", "2", log=tmp_path / "log") as fleet, Client(fleet.address) as client:
        wait_until(lambda: client.route([1]).num_replicas == 2)
        assert generate_all(client, range(12), 2) == [NEW_TOKENS] * 12
        slow = client.route([1]).address
        other = client.route([1], avoid=[slow]).address
        with slow_down(listener_of(slow, fleet.pids())):
            assert generate_all(client, range(100, 106), 2) == [NEW_TOKENS] * 6  # the fleet finds that it is slow
            slow_before, other_before = num_finished(slow), num_finished(other)
            assert generate_all(client, range(200, 230), 2) == [NEW_TOKENS] * 30
            by_slow, by_other = num_finished(slow) - slow_before, num_finished(other) - other_before
        assert by_slow + by_other >= 30
        assert by_other >= 3 * by_slow, (by_slow, by_other)
        assert client.route([1]).num_replicas == 2, "the fleet keeps a replica that is slow"


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

        def generate_until(num_replicas: int, num_at_once: int, new_tokens: int) -> list[int]:
            """Keep making calls until there are this many replicas. Return the number of tokens of each call."""

            def generate_repeatedly(_: int) -> list[int]:
                token_counts = []
                while client.route([1]).num_replicas != num_replicas and time.monotonic() < end_s:
                    token_counts.append(generate(client, next(numbers), new_tokens))
                return token_counts

            end_s = time.monotonic() + PATIENCE_S
            with ThreadPoolExecutor(num_at_once) as threads:
                return [*itertools.chain(*threads.map(generate_repeatedly, range(num_at_once)))]

        assert set(generate_until(2, num_at_once=12, new_tokens=4)) == {4}
        assert set(generate_until(1, num_at_once=4, new_tokens=500)) == {500}, (
            "calls of the replica that the fleet removed were finished as well"
        )
        assert client.route([1]).num_replicas == 1
