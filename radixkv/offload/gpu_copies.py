"""Copies of blocks between a GPU and pinned host memory, which complete asynchronously."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixkv.offload.tiers.host import map_memory

_log = logging.getLogger(__name__)
_SUCCESS = 0  # cudaSuccess


def map_pinned_memory(num_bytes: int, cudart: Any | None = None) -> memoryview:
    """Map memory and pin it (page-lock it), so that CUDA copies directly from and to it, without a buffer of its own.

    PyTorch's own pinned allocator rounds a size up to a power of two, so that 35 GB take 69 GB. This registers exactly
    the requested pages. If CUDA refuses, the memory is pageable: copies are correct, but slower, and the thread that
    starts a copy waits for it. A warning is logged.

    Args:
        num_bytes: the size. When the memory is pinned, all of its pages are allocated.
        cudart: the CUDA runtime; None for `torch.cuda.cudart()`.

    Raises:
        MemoryError: the system does not have enough memory.
    """
    memory = np.frombuffer(map_memory(num_bytes), np.uint8)
    if not num_bytes:
        return memory.data
    runtime = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    error = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(error) != _SUCCESS:
        _clear_last_error()
        _log.warning(
            "CUDA refused to pin %d bytes of host memory (%s): copies between this memory and the GPU are slower and "
            "delay steps; check the limit of locked memory (ulimit -l) and the free memory of the host",
            num_bytes,
            runtime.cudaGetErrorString(error),
        )
        return memory.data
    # Runs before the pages are unmapped, as the array holds the last reference to them.
    weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory.data


def _clear_last_error() -> None:
    """Clear the error that CUDA keeps for this thread, which PyTorch would report at its next kernel launch."""
    with contextlib.suppress(RuntimeError, AssertionError):  # a build of PyTorch without CUDA raises AssertionError
        torch.zeros(1, device="cuda")


class StagingSlots:
    """Slots of one size in one region of host memory, for blocks on their way between a GPU and the stores.

    A slot is freed when the last reference to its memory is dropped, on any thread. Any thread may take a slot.

    Args:
        memory: the region, for example from `map_pinned_memory`.
        slot_bytes: size of a slot. Slots begin at page boundaries.
    """

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._stride = staging_stride(slot_bytes)
        self._free_indexes = list(range(memory.nbytes // self._stride))

    @property
    def num_free(self) -> int:
        """Number of slots that are not in use."""
        return len(self._free_indexes)

    def take(self) -> npt.NDArray[np.uint8] | None:
        """Return the memory of a free slot, with arbitrary contents; None if all are in use."""
        try:
            index = self._free_indexes.pop()
        except IndexError:
            return None
        slot = np.frombuffer(self._memory, np.uint8, self._slot_bytes, index * self._stride)
        # No lock: a finalizer may run anywhere, also within `take`; appending to a list is atomic.
        weakref.finalize(slot, self._free_indexes.append, index).atexit = False
        return slot


def staging_stride(slot_bytes: int) -> int:
    """Return the bytes from one slot to the next: whole pages."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


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


class GpuCopies(NamedTuple):
    """The stream and the memory with which a `BlockMover` copies blocks of a GPU.

    Attributes:
        stream: copies in order with the steps.
        slots: pinned memory for payloads, of `BlockMover.payload_bytes` each.
    """

    stream: CopyStream
    slots: StagingSlots
