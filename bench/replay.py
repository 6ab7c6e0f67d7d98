"""Replays traffic against a prefill server with the cache, then without it, and compares.

A run makes three passes on one server: a short warm-up under its own tenant; the traffic under a tenant that is new for
this run, so that it starts cold on a running server too; and the same traffic, or a sample of it, with the cache
switched off. The token counts of each answer are checked, and the answers with and without the cache are compared. Time
limits, SIGINT and SIGTERM end a pass early; the report then covers the requests that were answered or failed, and says
so. The exit status is 0 if all these requests were answered and no compared answer differs, 1 if not, 2 if too little
was measured or the run could not start, and 130 (SIGINT) or 143 (SIGTERM) after an interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import grpc.aio

from bench.parts.environment import describe_run
from bench.parts.load_generator import (
    Ending,
    Pass,
    PrefillCall,
    ReplayTraffic,
    build_message,
    prefill_call,
    replay,
    sending_limit_s,
)
from bench.parts.options import DEFAULT_CONCURRENCY, ReplayOptions, parse_options
from bench.parts.progress import progress
from bench.parts.report import MIN_COMPARED, Summary, build_comparison, format_table, summarize
from bench.parts.result_file import write_json
from bench.parts.server_process import ServerProcess, serve_command
from bench.parts.workloads import (
    PublicTokens,
    WorkItem,
    count_reusable_tokens,
    median_prompt_tokens,
    public_tokens,
    spread_order,
    unrelated_prompts,
)
from radixkv.errors import ConfigError, RadixKVError
from radixkv.service.client.requests import prompt_request
from radixkv.v1 import cache_pb2, prefill_pb2
from radixkv.v1.cache_pb2_grpc import CacheServiceStub

_CONNECT_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 180.0
_MAX_WARM_UP_TOKENS = 4096

# The share that a part of the run may take of the time that is left of --time-limit-s when the part begins. The table
# and the plot get the remaining time.
_START_SHARE = 0.6
_WARM_UP_SHARE = 0.15
_WITH_CACHE_SHARE = 0.35
_WITHOUT_CACHE_SHARE = 0.8


class TimeBudget:
    """The time from the construction of this object to a limit.

    Args:
        limit_s: seconds; None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit, at least 0; infinite without a limit."""
        return float("inf") if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def share_s(self, share: float, max_s: float = float("inf")) -> float:
        """Return a share of the seconds left, or `max_s` if that is less; infinite without any limit."""
        return min(share * self.left_s, max_s)


class Interruption:
    """Ends a measurement early on SIGINT or SIGTERM.

    The first signal sets `event` and restores the previous handlers, so that a second signal can end the process.

    Attributes:
        signal_number: the first signal that arrived; None if none did.
        event: set when the first signal arrives.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.event = asyncio.Event()

    @property
    def name(self) -> str | None:
        """Name of the signal that arrived, such as SIGINT; None if none did."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle both signals inside a `with` statement. Must be called in an event loop of the main thread."""
        loop = asyncio.get_running_loop()
        previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.signal_number = number
            loop.call_soon_threadsafe(self.event.set)
            restore()

        for number in previous_handlers:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            restore()


@dataclass(frozen=True, slots=True)
class ReplayPasses:
    """All passes of a run.

    Attributes:
        tenant: tenant of the pass with the cache.
        with_cache: the pass over all requests.
        without_cache: the pass over requests of `with_cache`; None if it was not requested or did not begin.
        stats_before, stats_after: server statistics around the pass with the cache; None if the server has none.
        interrupted_by: name of the signal that ended the run early; None if none did.
    """

    tenant: str
    with_cache: Pass
    without_cache: Pass | None
    stats_before: cache_pb2.StatsResponse | None
    stats_after: cache_pb2.StatsResponse | None
    interrupted_by: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table. Returns the exit status."""
    options = parse_options(arguments)
    # SIGTERM unwinds the stack as Ctrl-C does, so that the server that was started here is stopped. SIGINT gets a
    # handler because a shell starts its background jobs with SIGINT ignored.
    handlers = {signal.SIGTERM: _exit_on_signal, signal.SIGINT: signal.default_int_handler}
    previous_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return run(options, arguments)
    except RadixKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def run(options: ReplayOptions, arguments: Sequence[str] | None) -> int:
    """Measure, print the table, write the JSON file and the plot if requested, and return the exit status.

    Args:
        options: the parsed command line.
        arguments: the command line for the report; None for that of this process.

    Raises:
        ConfigError: the trace or the tokenizer can't be used, the server can't be started or reached, it refuses a
            public prefix, or no request was answered or failed before the time limit.
    """
    budget = TimeBudget(options.time_limit_s)
    environment: Summary = describe_run("bench.replay", arguments)
    items = options.build_items()
    # Everything is built before anything is timed.
    messages = [build_message(item.token_ids) for item in items]
    if options.time_limit_s is not None:
        _note(options, f"this run ends within {options.time_limit_s:,.0f} s, whatever it has measured by then")
    with _running_server(options, budget) as address:
        measured = asyncio.run(measure(address, options, items, messages, budget))
    status = 0 if measured.interrupted_by is None else 128 + signal.Signals[measured.interrupted_by]
    if not measured.with_cache.outcomes:
        if status:
            print("interrupted before the first answer: nothing to report", file=sys.stderr)
            return status
        raise ConfigError(
            f"no request was answered in time: expected a longer --time-limit-s, got {options.time_limit_s:g}"
        )
    report = build_report(options, items, measured) | environment
    if options.json is not None:
        write_json(options.json, report)
    print(format_table(report), flush=True)
    if options.plot is not None:
        from bench.parts.picture import draw_ttft  # imports matplotlib: slow, and needed here only

        draw_ttft(options.plot, report, measured.with_cache, measured.without_cache)
        print(f"plot: {options.plot}")
    return status or exit_status(options, report)


def exit_status(options: ReplayOptions, report: Summary) -> int:
    """Return the exit status of a run that was not interrupted.

    It is 1 if a request failed or an answer differs, 2 if a comparison was requested and is missing, else 0.
    """
    without_cache = report["without_cache"] or {"errors": 0}
    if report["errors"] + without_cache["errors"] + report["answers"]["different"]:
        return 1
    return 2 if options.baseline_requests != 0 and report["speedup"] is None else 0


async def measure(
    address: str,
    options: ReplayOptions,
    items: Sequence[WorkItem],
    messages: Sequence[prefill_pb2.PrefillRequest],
    budget: TimeBudget,
) -> ReplayPasses:
    """Run all passes against a server, until the time limit is reached or a signal arrives."""
    channel_options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # the latency of a proxy must not be measured
    ]
    interruption = Interruption()
    show_progress = functools.partial(progress, stream=sys.stderr, use_lines=options.progress)

    def traffic_of(tenant: str, *, use_cache: bool, max_s: float) -> ReplayTraffic:
        limit_s = None if math.isinf(max_s) else max_s
        return ReplayTraffic(tenant, use_cache, options.concurrency, options.timeout_s, limit_s)

    async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(f"server {address}: expected a connection within {_CONNECT_TIMEOUT_S:g} s") from None
        call = prefill_call(channel)
        with interruption.handled():
            await _warm_up(call, options, items, budget, interruption.event)
            public = public_tokens_of(options, items)
            stats_before = await _read_stats(channel)
            tenant = f"replay-{secrets.token_hex(4)}"
            _note(options, f"{options.describe_workload(items)}; {options.describe_traffic()}")
            async with _registered_prefixes(channel, public, options.timeout_s):
                max_s = sending_limit_s(budget.share_s(1 if options.baseline_requests == 0 else _WITH_CACHE_SHARE))
                traffic = traffic_of(tenant, use_cache=True, max_s=max_s)
                with show_progress("with cache", len(items), limit_s=traffic.limit_s) as on_answer:
                    with_cache = await replay(call, items, messages, traffic, on_answer, stop=interruption.event)
                stats_after = await _read_stats(channel)
            without_cache = None
            baseline_indices = choose_baseline(options, with_cache)
            if baseline_indices and not interruption.event.is_set():
                max_s = min(sending_limit_s(budget.share_s(_WITHOUT_CACHE_SHARE)), options.baseline_seconds)
                traffic = traffic_of(tenant, use_cache=False, max_s=max_s)
                with show_progress("without cache", len(baseline_indices), limit_s=traffic.limit_s) as on_answer:
                    without_cache = await replay(
                        call, items, messages, traffic, on_answer, order=baseline_indices, stop=interruption.event
                    )
    if interruption.name is not None:
        print(f"{interruption.name}: reporting what was measured so far", file=sys.stderr)
    return ReplayPasses(tenant, with_cache, without_cache, stats_before, stats_after, interruption.name)


def public_tokens_of(options: ReplayOptions, items: Sequence[WorkItem]) -> PublicTokens:
    """Return the prefixes that are made public for the pass with the cache; none without `--public-prefix`."""
    return public_tokens(items, options.prefix_tokens) if options.public_prefix else {}


def choose_baseline(options: ReplayOptions, with_cache: Pass) -> list[int]:
    """Return the indices of the requests that the pass without the cache sends, in the order of sending.

    These requests are those that were answered or failed in the pass with the cache. The time may end before all of
    them are sent. In a closed loop the order is therefore such that the requests sent so far are spread evenly over the
    traffic. In an open loop they are sent in their original order, so that the arrival rate is the same in both passes.
    """
    indices = [outcome.index for outcome in with_cache.outcomes]
    if options.concurrency is not None:
        indices = [indices[position] for position in spread_order(len(indices))]
    return indices[: options.baseline_requests]


def describe_baseline(options: ReplayOptions, measured: ReplayPasses) -> str:
    """Describe how many and which requests the pass without the cache replayed, and why not all."""
    if options.baseline_requests == 0:
        return "not measured, as requested"
    without_cache = measured.without_cache
    if without_cache is None or not without_cache.outcomes:
        return f"not measured: {measured.interrupted_by or 'the time limit'} came before an answer"
    num_without_cache, num_with_cache = len(without_cache.outcomes), len(measured.with_cache.outcomes)
    num_planned = measured.with_cache.num_planned
    if num_without_cache == num_planned:
        return f"the same {num_planned:,} requests"
    text = f"a sample: {num_without_cache:,} of {num_planned:,} requests, "
    text += "the first ones" if options.concurrency is None else "spread evenly"
    if num_with_cache < num_planned:
        text += f" over the {num_with_cache:,} that were answered with the cache"
    if without_cache.ended_by is Ending.INTERRUPTED:
        text += "; interrupted"
    elif without_cache.ended_by is Ending.TIME_LIMIT:
        text += "; its time limit was reached"
    elif options.baseline_requests is not None:
        text += "; as requested"
    if options.concurrency is None:
        text += "; in such a short pass requests queue less than in a pass over all requests"
    return text


def build_report(options: ReplayOptions, items: Sequence[WorkItem], measured: ReplayPasses) -> Summary:
    """Collect the numbers of a run; `run` adds the environment."""
    min_compared = min(MIN_COMPARED, len(items), options.baseline_requests or MIN_COMPARED)
    comparison = build_comparison(measured.with_cache, measured.without_cache, min_compared)
    sent_items = [items[outcome.index] for outcome in measured.with_cache.outcomes]
    before, after = measured.stats_before, measured.stats_after
    return {
        "workload": options.workload,
        "partial": measured.interrupted_by is not None or measured.with_cache.ended_by is not Ending.FINISHED,
        "interrupted_by": measured.interrupted_by,
        **summarize(measured.with_cache),
        "without_cache": None if measured.without_cache is None else summarize(measured.without_cache),
        "speedup": comparison.speedup,
        "model": after.model if after else options.model,
        "device": after.device if after else options.device,
        "answers": {"compared": comparison.compared, "different": comparison.different, "required": min_compared},
        "baseline_sample": {
            "planned": options.baseline_requests != 0,
            "requests": len(measured.without_cache.outcomes) if measured.without_cache else 0,
            "of": len(items),
            "text": describe_baseline(options, measured),
            # For the requests that were answered in both passes.
            "with_cache_ttft_ms": comparison.with_cache_ttft_ms,
            "with_cache_server_prefill_ms": comparison.with_cache_server_prefill_ms,
        },
        "workload_text": options.describe_workload(items),
        "traffic_text": options.describe_traffic(),
        "concurrency": options.concurrency,
        "time_limit_s": options.time_limit_s,
        "seed": options.seed,
        "adapters": options.adapters,
        "tenants": options.tenants,
        "public_prefixes": len(public_tokens_of(options, items)),
        # What a cache of infinite size would reuse if the requests were computed one by one, in this order.
        "reusable_tokens": count_reusable_tokens(sent_items, public_tokens_of(options, items)),
        "tenant": measured.tenant,
        "server": {
            "started_here": options.address is None,
            "settings": list(options.settings),
            "block_size": after.block_size if after else None,
            "capacity_tokens": after.blocks.total * after.block_size if after else None,
            "blocks_in_use": after.blocks.total - after.blocks.free if after else None,
            "computed_tokens": after.tokens.computed - before.tokens.computed if after and before else None,
            "evicted_blocks": after.evicted_blocks - before.evicted_blocks if after and before else None,
        },
    }


async def _warm_up(
    call: PrefillCall, options: ReplayOptions, items: Sequence[WorkItem], budget: TimeBudget, stop: asyncio.Event
) -> None:
    """Send prompts that are not part of the traffic, with the cache and without, until the time limit is reached."""
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    num_tokens = min(median_prompt_tokens(items), _MAX_WARM_UP_TOKENS)
    prompts = unrelated_prompts(concurrency, num_tokens, options.vocab_size)
    # A miss, a hit of the whole prompt, and a hit of its first half.
    half = num_tokens // 2
    half_shared = prompts[0].copy()
    half_shared[half:] = prompts[-1][::-1][half:]
    cached = [WorkItem(0.0, prompts[0]), WorkItem(0.0, prompts[0]), WorkItem(0.0, half_shared)]
    uncached = [WorkItem(0.0, prompt) for prompt in prompts]
    for batch, use_cache, num_at_once in ((cached, True, 1), (uncached, False, concurrency)):
        max_s = sending_limit_s(budget.share_s(_WARM_UP_SHARE / 2))
        traffic = ReplayTraffic(
            "warmup", use_cache, num_at_once, options.timeout_s, None if math.isinf(max_s) else max_s
        )
        await replay(call, batch, [build_message(item.token_ids) for item in batch], traffic, stop=stop)


@contextlib.asynccontextmanager
async def _registered_prefixes(
    channel: grpc.aio.Channel, public: PublicTokens, timeout_s: float
) -> AsyncIterator[None]:
    """Register prefixes, and unregister them at the end.

    Raises:
        ConfigError: the server refuses a prefix.
    """
    cache: Any = CacheServiceStub(channel)  # type: ignore[no-untyped-call]
    run_id = secrets.token_hex(4)
    names: list[str] = []
    try:
        for (adapter, _), prefix in public.items():
            name = f"replay-{run_id}-{len(names)}"
            try:
                await cache.RegisterPublicPrefix(
                    prompt_request(cache_pb2.RegisterPublicPrefixRequest, prefix, name=name, adapter=adapter),
                    timeout=timeout_s,
                )
            except grpc.aio.AioRpcError as error:
                raise ConfigError(f"--public-prefix: {error.code().name}: {error.details()}") from error
            names.append(name)
        yield
    finally:
        for name in names:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a server that has stopped has no prefixes
                request = cache_pb2.UnregisterPublicPrefixRequest(name=name)
                await cache.UnregisterPublicPrefix(request, timeout=timeout_s)


async def _read_stats(channel: grpc.aio.Channel) -> cache_pb2.StatsResponse | None:
    cache: Any = CacheServiceStub(channel)  # type: ignore[no-untyped-call]
    try:
        answer: cache_pb2.StatsResponse = await cache.Stats(cache_pb2.StatsRequest(), timeout=_CONNECT_TIMEOUT_S)
        return answer
    except grpc.aio.AioRpcError as error:
        print(f"warning: server statistics are missing: {error.code().name}", file=sys.stderr)
        return None


@contextlib.contextmanager
def _running_server(options: ReplayOptions, budget: TimeBudget) -> Iterator[str]:
    """Yield the address of the given server, or of a server that runs inside the `with` statement."""
    if options.address is not None:
        yield options.address
        return
    _note(options, f"starting a server with model {options.model or 'tiny'}")
    with tempfile.TemporaryDirectory() as folder:
        settings = options.settings
        if options.adapters:
            from bench.parts.adapter_files import write_adapters  # imports torch: slow, and needed here only

            settings += tuple(write_adapters(options.model or "tiny", Path(folder), options.adapters))
        start_timeout_s = budget.share_s(_START_SHARE, _START_TIMEOUT_S)
        server = ServerProcess(serve_command(options.model, options.device, settings), start_timeout_s=start_timeout_s)
        with server as address:
            yield address
    if status := server.stop():
        print(f"warning: server: expected exit status 0 after SIGTERM, got {status}", file=sys.stderr)


def _note(options: ReplayOptions, text: str) -> None:
    if options.progress or sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
