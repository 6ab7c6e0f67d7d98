from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixkv.kernels.cpu import stopwatch
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, GemmBackend
from radixkv.kernels.cpu.gemm_trial import GemmChoice, choose_gemm
from radixkv.kernels.cpu.stopwatch import CallTime, Stopwatch, waited_s

ROWS = torch.zeros(1, 1)


class Machine:
    """A machine with a fake clock, on which calls take a given time and wait for a processor during a part of it."""

    now_s = waited_s = 0.0

    def watch(self) -> Stopwatch:
        return Stopwatch(lambda: self.now_s, lambda: self.waited_s)

    def calls(self, *times: tuple[float, float]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield calls.

        Args:
            times: for each call the seconds that it takes, and how many of them it waits. All further calls are like
                the last one.
        """

        def call(rows: torch.Tensor, took_s: float, waited_s: float) -> torch.Tensor:
            self.now_s += took_s
            self.waited_s += waited_s
            return rows

        for took_and_waited_s in itertools.chain(times, itertools.repeat(times[-1])):
            yield lambda rows, seconds=took_and_waited_s: call(rows, *seconds)


def test_the_shortest_call_counts_and_short_ones_are_repeated() -> None:
    machine = Machine()
    assert machine.watch().shortest_s(machine.calls((9e-3, 0), (3e-3, 0), (2e-3, 0)), ROWS) == pytest.approx(2e-3)
    assert machine.now_s == pytest.approx(14e-3)  # one call of each
    assert machine.watch().shortest_s(machine.calls((1e-4, 0)), ROWS) == pytest.approx(1e-4)
    assert machine.now_s == pytest.approx(14e-3 + 20 * 1e-4)


def test_a_call_that_was_descheduled_does_not_count_if_others_were_not() -> None:
    machine = Machine()
    watch = machine.watch()
    # The first call waits for more than a quarter of its time, the others for less.
    assert watch.shortest_s(machine.calls((4e-3, 1.1e-3), (6e-3, 1e-3)), ROWS) == pytest.approx(6e-3)
    assert not watch.is_busy
    earlier_call = CallTime(1e-6, has_waited=True)
    assert watch.shortest_s(machine.calls((5e-4, 1e-4)), ROWS, (earlier_call,)) == pytest.approx(5e-4)


def test_a_machine_is_busy_after_many_descheduled_calls_and_timing_ends() -> None:
    machine = Machine()
    watch = machine.watch()
    assert watch.shortest_s(machine.calls((8e-3, 7e-3)), ROWS) == pytest.approx(8e-3)
    assert machine.now_s == pytest.approx(4 * 8e-3), "the machine is busy after at least 30 ms"
    assert watch.is_busy
    watch.shortest_s(machine.calls((1e-5, 0)), ROWS)
    assert machine.now_s == pytest.approx(32e-3 + 2e-5)


def test_a_single_thread_is_timed_by_its_cpu_clock() -> None:
    usual_num_threads = torch.get_num_threads()
    try:
        for num_threads, measures_waiting in ((1, False), (2, True)):
            torch.set_num_threads(num_threads)
            assert (Stopwatch.here()._waited is waited_s) is measures_waiting
    finally:
        torch.set_num_threads(usual_num_threads)


def test_linux_reports_how_long_threads_waited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert waited_s() >= 0
    monkeypatch.setattr(stopwatch, "_THREADS", tmp_path)
    for thread, waited_ns in (("1", 2_000_000), ("2", 500_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"77 {waited_ns} 3\n")
    assert waited_s() == pytest.approx(2.5e-3)
    (tmp_path / "3").mkdir()
    assert waited_s() == pytest.approx(2.5e-3), "a thread that has just ended takes nothing from the others"
    monkeypatch.setattr(stopwatch, "_THREADS", tmp_path / "4")
    assert waited_s() == 0


def test_on_a_busy_machine_a_batch_invariant_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def add_backend(name: str, took_s: float, waited_s: float, is_batch_invariant: bool) -> None:
        def multiply(rows: torch.Tensor, weight: torch.Tensor, _: object) -> torch.Tensor:
            machine.now_s += took_s
            machine.waited_s += waited_s
            return rows @ weight.T

        backend = GemmBackend(torch.clone, multiply, (torch.float32,), is_batch_invariant=is_batch_invariant)
        monkeypatch.setitem(GEMM_BACKENDS, name, backend)

    add_backend("invariant", took_s=1000, waited_s=500, is_batch_invariant=True)
    add_backend("fast", took_s=1, waited_s=0, is_batch_invariant=False)

    def choose(watch: Stopwatch) -> GemmChoice | None:
        monkeypatch.setattr(Stopwatch, "here", lambda: watch)
        return choose_gemm(torch.ones(8, 8), None, ("fast", "invariant"), is_exact=False)

    assert choose(machine.watch()) == GemmChoice("invariant")
    watch_without_waits = Stopwatch(lambda: machine.now_s)
    assert choose(watch_without_waits) == GemmChoice("fast"), "no call counts as one that waited"
