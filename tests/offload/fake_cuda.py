"""CUDA streams, events and a runtime without a GPU, which run operations as late as stream order allows."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

COPY_MS = 2.0  # between two events, as `elapsed_time` reports it


class FakeEvent:
    """An event of a stream. `is_passed` is true when the stream has run everything up to it."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing
        self.is_passed = False
        self._stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self._stream = stream
        stream.operations.append(self._pass)

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        while not self.is_passed:
            assert self._stream is not None, "the event was never recorded"
            self._stream.operations.popleft()()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing
        assert end.enable_timing
        assert self.is_passed
        assert end.is_passed
        return COPY_MS

    def _pass(self) -> None:
        self.is_passed = True


class FakeStream:
    """A queue of operations, which run in order, and only when a caller or another stream waits for them."""

    def __init__(self) -> None:
        self.operations: deque[Callable[[], object]] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        self.operations.append(event.synchronize)

    def wait_stream(self, stream: FakeStream) -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        while self.operations:
            self.operations.popleft()()


class FakeCuda(TorchFunctionMode):
    """Takes the place of `torch.cuda`. While it is entered, non-blocking copies go to the current stream.

    Attributes:
        compute: the stream on which steps run.
        num_blocking_copies: number of copies without `non_blocking`, for which a real GPU would make the host wait.
    """

    Event = FakeEvent

    def __init__(self) -> None:
        super().__init__()
        self.compute = FakeStream()
        self.num_blocking_copies = 0
        self._current = self.compute

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - the name that torch.cuda has
        return FakeStream()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self._current = self._current, stream
        yield
        self._current = previous

    def launch(self, kernel: Callable[[], object]) -> None:
        """Launch a kernel of a step."""
        self.compute.operations.append(kernel)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        if not (kwargs or {}).get("non_blocking"):
            self.num_blocking_copies += 1
            return func(*args, **(kwargs or {}))
        target, source = args
        self._current.operations.append(partial(torch.ops.aten.copy_, target, source))
        return target


class FakeCudaRuntime:
    """Takes the place of `torch.cuda.cudart()`.

    Args:
        error: what `cudaHostRegister` returns.

    Attributes:
        pinned: bytes of each region that is pinned, by address.
        unpinned: the first byte of each region when it was unpinned, which shows that it was still mapped.
    """

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.unpinned: list[int] = []
        self._error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self._error:
            self.pinned[address] = num_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        self.unpinned.append(ctypes.c_uint8.from_address(address).value)
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"
