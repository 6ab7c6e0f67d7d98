"""Times calls on a device by device events, and measures the peak rates of the device."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_MIN_SAMPLES, _MAX_SAMPLES = 10, 50
_SAMPLING_S = 0.1  # device time of all samples together

# While the host enqueues launches, the device waits, at most this long. The wait is given in cycles of a 2 GHz clock.
_MAX_WAIT_S = 0.5
_CYCLES_PER_S = 2e9

# On a GPU, the two buffers of the copy are much larger than the cache, and the matmul is large enough for the library's
# best kernel.
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 128}

_CACHE_MULTIPLE = 3  # all input sets together are at least this many times as large as the cache

# Times on a CPU are meaningless, so any cache size will do there.
_CPU_CACHE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Median times of a call.

    Attributes:
        device_ms: time from start to end on the device.
        host_ms: time that the host takes to launch it.
    """

    device_ms: float
    host_ms: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates that the device reaches in this run.

    Attributes:
        flops_per_s: rate of a large matmul of square random bfloat16 matrices.
        bytes_per_s: rate of a large copy in device memory; bytes read and written are counted.
    """

    flops_per_s: float
    bytes_per_s: float


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of a device's largest cache.

    Inputs that are used in turn, and are larger than this together, are read from the device's memory.
    """
    if device.type == "cpu":
        return _CPU_CACHE_BYTES
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """Return the number of input sets that evict each other from the cache before a set is used again."""
    return max(2, -(-_CACHE_MULTIPLE * cache_bytes // set_bytes))


def measure(calls: Sequence[Call], device: torch.device) -> CallTiming:
    """Time calls that do the same work on different inputs, in turn, after a call of each to warm up.

    A GPU first waits until the host has launched everything, for at most 0.5 s, so that it does not wait for launches
    later. On a CPU both times are equal.

    Args:
        calls: at least one. Their inputs and outputs together are larger than the cache.
        device: device of the calls.
    """
    for call in calls:
        call()
    if device.type == "cpu":
        samples_s = [time_host_s(call) for call in calls]
        return CallTiming(statistics.median(samples_s) * 1e3, statistics.median(samples_s) * 1e3)
    torch.cuda.synchronize(device)
    turns = itertools.cycle(calls)  # not restarted, because the inputs that were used last are in the cache
    trial_ms, _ = _take_samples(turns, len(calls), wait_s=0.0)
    num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, int(_SAMPLING_S * 1e3 / statistics.median(trial_ms))))
    _, enqueue_s = _take_samples(turns, num_samples, wait_s=0.0)
    # The device waits somewhat longer than the launches took just before.
    device_ms, host_s = _take_samples(turns, num_samples, wait_s=min(_MAX_WAIT_S, 1.5 * enqueue_s))
    return CallTiming(statistics.median(device_ms), host_s * 1e3 / num_samples)


def time_host_s(call: Call) -> float:
    """Return the seconds that a call takes on the host."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _take_samples(turns: Iterator[Call], num_samples: int, wait_s: float) -> tuple[list[float], float]:
    """Time calls. Returns the device time of each in milliseconds, and the host time of launching all in seconds.

    Args:
        turns: calls to make; consumed.
        num_samples: number of calls to time.
        wait_s: time that the device waits before the first call, if its clock has 2 GHz.
    """
    events = [(_create_event(), _create_event()) for _ in range(num_samples)]
    torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    start_s = time.perf_counter()
    for begin, end in events:
        begin.record()
        next(turns)()
        end.record()
    host_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events], host_s


def _create_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_rates(device: torch.device) -> DeviceRates:
    """Measure the peak rates of the device. On a CPU the sizes are too small for meaningful rates."""
    size, num_bytes = _MATRIX_SIZE[device.type], _COPY_BYTES[device.type]
    matrices = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    product = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    product_ms = measure([lambda: torch.mm(matrices[0], matrices[1], out=product)], device).device_ms
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = measure([lambda: target.copy_(source)], device).device_ms
    return DeviceRates(2 * size**3 / product_ms * 1e3, 2 * num_bytes / copy_ms * 1e3)
