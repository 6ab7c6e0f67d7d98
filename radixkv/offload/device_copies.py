"""Copies between host memory and a GPU, which complete asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


class StreamCopy:
    """A copy on a CUDA stream.

    Args:
        started, ended: events around it, with timing.
    """

    def __init__(self, started: Any, ended: Any) -> None:
        self._started = started
        self._ended = ended

    def is_complete(self) -> bool:
        """Whether the GPU has passed the end of the copy."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Block until the GPU has passed the end of the copy, without holding the GIL."""
        self._ended.synchronize()

    def seconds(self) -> float:
        """Return the time on the GPU from the start of the copy to its end."""
        return float(self._started.elapsed_time(self._ended)) / 1000


class CopyStream:
    """Copies between pinned host memory and a GPU on a CUDA stream of their own, in order with the steps.

        compute stream   ── step n ──┬──────────────── wait ──▶ step n + 1
                                     │                   ▲
        copy stream                 wait ──▶ copies ── event

    Copies begin after all work that was launched before them on the current stream, so they read what it wrote. Work
    that is launched afterwards waits for their event, so it neither reads a block before it is filled, nor overwrites
    a block before it is copied. The host does not wait. Copies take no device memory. Not thread-safe.

    Args:
        device: the GPU.
        cuda: `torch.cuda`, or a fake in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._in_flight: deque[tuple[StreamCopy, object]] = deque()  # with the memory that each copy uses

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], host_memory: object) -> StreamCopy:
        """Start to copy.

        Args:
            pairs: targets and sources, one of each on the device, contiguous and of equal sizes.
            host_memory: whatever keeps the memory on the host allocated; it is kept until the copy is complete.
        """
        self.release_complete()
        compute_stream = self._cuda.current_stream(self._device)
        started = self._cuda.Event(enable_timing=True)
        ended = self._cuda.Event(enable_timing=True, blocking=True)  # threads that wait for it sleep
        self._stream.wait_stream(compute_stream)
        with self._cuda.stream(self._stream):
            started.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ended.record(self._stream)
        compute_stream.wait_event(ended)
        copy = StreamCopy(started, ended)
        self._in_flight.append((copy, host_memory))
        return copy

    def release_complete(self) -> None:
        """Release the host memory of copies that are complete. Copies complete in the order of their start."""
        while self._in_flight and self._in_flight[0][0].is_complete():
            self._in_flight.popleft()
