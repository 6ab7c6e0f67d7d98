"""A prefill service without a model: its cache of prefixes never evicts, and tests make its requests fail.

`python -m tests.bench.fake_service` listens and prints its address like `radixkv serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from radixkv.v1 import cache_pb2, cache_pb2_grpc, prefill_pb2, prefill_pb2_grpc

FaultInjector = Callable[[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse], grpc.StatusCode | None]


@dataclass
class FakeService(prefill_pb2_grpc.PrefillServiceServicer, cache_pb2_grpc.CacheServiceServicer):
    """Answers with exact token counts.

    Attributes:
        inject_fault: may change the response to a request, or return the status that it fails with.
        delay_s: how long each request takes.
        min_concurrency: each request waits until this many have been running at the same time.
        calls: number of requests, by tenant and whether the cache was used.
        max_running: the maximum number of requests that ran at the same time.
    """

    inject_fault: FaultInjector = lambda request, response: None
    delay_s: float = 0.0
    min_concurrency: int = 0
    calls: Counter[tuple[str, bool]] = field(default_factory=Counter)
    max_running: int = 0
    _num_running: int = 0
    _prefixes: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _condition: threading.Condition = field(default_factory=threading.Condition)

    def Prefill(  # noqa: N802 - the name on the wire
        self, request: prefill_pb2.PrefillRequest, context: grpc.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        tokens = tuple(request.token_ids)
        prefixes = [(request.tenant, tokens[:end]) for end in range(1, len(tokens) + 1)]
        with self._condition:
            self.calls[request.tenant, request.read_cache] += 1
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
            self._condition.notify_all()
            cached_tokens = 0
            if request.read_cache:
                while cached_tokens < len(tokens) - 1 and prefixes[cached_tokens] in self._prefixes:
                    cached_tokens += 1
            if request.write_cache:
                self._prefixes.update(prefixes)
            self._condition.wait_for(lambda: self.max_running >= self.min_concurrency)
        time.sleep(self.delay_s)
        with self._condition:
            self._num_running -= 1
        response = prefill_pb2.PrefillResponse(
            usage=prefill_pb2.Usage(
                prompt_tokens=len(tokens), cached_tokens=cached_tokens, computed_tokens=len(tokens) - cached_tokens
            ),
            next_token_id=sum(tokens) % 256,
            timing=prefill_pb2.Timing(queue_us=1500, prefill_us=2500, total_us=4000),
        )
        status = self.inject_fault(request, response)
        if status is not None:
            context.abort(status, "on purpose")
        return response

    def Stats(  # noqa: N802 - the name on the wire
        self, request: cache_pb2.StatsRequest, context: grpc.ServicerContext
    ) -> cache_pb2.StatsResponse:
        return cache_pb2.StatsResponse(
            model="fake", device="none", block_size=64, blocks=cache_pb2.BlockStats(total=100), evicted_blocks=0
        )


@contextlib.contextmanager
def serving(service: FakeService, num_threads: int = 16) -> Iterator[str]:
    """Serve on background threads; yield the address."""
    with ThreadPoolExecutor(num_threads) as threads:
        server = grpc.server(threads)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(service, server)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()


def stall_after(num_answered: int, stalled_file: Path | None, stop: threading.Event) -> FaultInjector:
    """Return a function that lets some requests pass and blocks all later ones until `stop` is set.

    The file is created when the first request blocks.
    """
    numbers = itertools.count()

    def stall(request: prefill_pb2.PrefillRequest, response: prefill_pb2.PrefillResponse) -> None:
        if next(numbers) >= num_answered:
            if stalled_file is not None:
                stalled_file.touch()
            stop.wait()

    return stall


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall-after", type=int, metavar="N")
    parser.add_argument("--stalled-file", type=Path)
    parser.add_argument("--pid-file", type=Path)
    args = parser.parse_args()
    if args.pid_file is not None:
        args.pid_file.write_text(str(os.getpid()))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = FakeService()
    if args.stall_after is not None:
        service = FakeService(stall_after(args.stall_after, args.stalled_file, stop))
    with serving(service) as address:
        print(f"listening on {address}", flush=True)
        stop.wait()


if __name__ == "__main__":
    sys.exit(main())
