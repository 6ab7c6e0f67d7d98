"""Replays traffic against a prefill server with the cache, then without it, and compares.

Three passes on one server: a short warm-up under its own tenant; the traffic under a tenant that is new for this run,
so that it starts cold also on a running server; the same traffic with the cache switched off. Every answer is checked.
The exit status is 0 if all answers came and were right, 1 if not, 2 if nothing could be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc
import grpc.aio

from bench.parts.adapters.reusable_tokens import count_reusable_tokens
from bench.parts.environment import describe_run
from bench.parts.load_generator import OK, Pass, PrefillCall, Traffic, build_message, prefill_call, replay
from bench.parts.options import DEFAULT_CONCURRENCY, Options, parse_options
from bench.parts.progress import progress
from bench.parts.public.registration import PublicTokens, made_public, public_tokens
from bench.parts.report import Summary, compare_answers, format_table, speedup, summarize, ttft_ms
from bench.parts.result_file import write_json
from bench.parts.server_process import ServerProcess, serve_command
from bench.parts.workloads import WorkItem, evenly_spaced, median_prompt_tokens, sample, unrelated_prompts
from radixkv.errors import ConfigError, RadixKVError
from radixkv.v1 import cache_pb2, prefill_pb2

_CONNECT_TIMEOUT_S = 20.0
_MAX_WARM_UP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """All passes of a run.

    Attributes:
        tenant: of the pass with the cache.
        with_cache: the pass over all requests.
        without_cache: the pass over `baseline_indices`; None if it was not asked for.
        baseline_indices: requests that the pass without the cache replayed.
        baseline_text: `baseline_indices` for people, with the reason.
        stats_before, stats_after: server statistics around the pass with the cache; None if the server has none.
    """

    tenant: str
    with_cache: Pass
    without_cache: Pass | None
    baseline_indices: list[int]
    baseline_text: str
    stats_before: cache_pb2.StatsResponse | None
    stats_after: cache_pb2.StatsResponse | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table. Returns the exit status."""
    options = parse_options(arguments)
    command = shlex.join(["python", "-m", "bench.replay", *(sys.argv[1:] if arguments is None else arguments)])
    # Unwinds the stack as Ctrl-C does, so that the server started here is stopped.
    previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        report = run(options, command)
    except RadixKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    print(format_table(report))
    if options.plot is not None:
        print(f"picture: {options.plot}")
    failures = report["errors"] + (report["without_cache"] or {"errors": 0})["errors"] + report["answers"]["different"]
    return 1 if failures else 0


def run(options: Options, command: str) -> Summary:
    """Measure, write the JSON file and the picture that were asked for, and return the report.

    Raises:
        ConfigError: the trace can't be read, or the server can't be started or reached.
    """
    environment: Summary = {"command": command, **describe_run()}
    items = options.build_items()
    # Everything is built before anything is timed.
    messages = [build_message(item.token_ids) for item in items]
    with _server(options) as address:
        measured = asyncio.run(measure(address, options, items, messages))
    report = build_report(options, items, measured) | environment
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        from bench.parts.picture import draw_ttft  # imports matplotlib: slow, and needed here only

        draw_ttft(options.plot, report, measured.with_cache, measured.without_cache, measured.baseline_indices)
    return report


async def measure(
    address: str, options: Options, items: Sequence[WorkItem], messages: Sequence[prefill_pb2.PrefillRequest]
) -> Measured:
    """Run all passes against a server."""
    channel_options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # a proxy's latency is not what is measured
    ]
    async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(f"server {address}: expected a connection within {_CONNECT_TIMEOUT_S:g} s") from None
        call = prefill_call(channel)
        uncached_tokens_per_s = await _warm_up(call, options, items)
        public = public_tokens_of(options, items)
        stats_before = await _read_stats(channel)
        tenant = f"replay-{secrets.token_hex(4)}"
        cached = Traffic(tenant, True, options.concurrency, options.timeout_s)
        _note(options, f"{options.describe_workload(items)}; {options.describe_traffic()}")
        show = functools.partial(progress, stream=sys.stderr, use_lines=options.progress)
        async with made_public(channel, public, options.timeout_s):
            with show("with cache", len(items)) as on_answer:
                with_cache = await replay(call, items, messages, cached, on_answer)
            stats_after = await _read_stats(channel)
        indices, text = choose_baseline(options, items, uncached_tokens_per_s)
        without_cache = None
        if indices:
            uncached = Traffic(tenant, False, options.concurrency, options.timeout_s)
            sampled = sample(items, indices)
            with show("without cache", len(indices)) as on_answer:
                without_cache = await replay(call, sampled, [messages[i] for i in indices], uncached, on_answer)
    return Measured(tenant, with_cache, without_cache, indices, text, stats_before, stats_after)


def public_tokens_of(options: Options, items: Sequence[WorkItem]) -> PublicTokens:
    """Return the prefixes that are made public for the pass with the cache; none unless asked for."""
    return public_tokens(items, options.prefix_tokens) if options.public_prefix else {}


def choose_baseline(
    options: Options, items: Sequence[WorkItem], uncached_tokens_per_s: float | None
) -> tuple[list[int], str]:
    """Choose which requests the pass without cache replays.

    Args:
        options: `baseline_requests` and `baseline_seconds` bound the pass.
        items: the whole workload.
        uncached_tokens_per_s: measured rate of computing prompts; None if unknown.

    Returns:
        Indices, evenly spaced, and a sentence that says how many there are and why.
    """
    if options.baseline_requests == 0:
        return [], "not measured, as asked"
    num_tokens = sum(len(item.token_ids) for item in items)
    all_s = num_tokens / uncached_tokens_per_s if uncached_tokens_per_s else 0.0
    if options.concurrency is None:  # a closed loop does not wait for arrivals
        all_s = max(all_s, items[-1].arrival_s)
    num_kept, why = len(items), ""
    if options.baseline_requests is not None:
        num_kept, why = min(len(items), options.baseline_requests), "as asked"
    elif all_s > options.baseline_seconds:
        num_kept = max(1, int(len(items) * options.baseline_seconds / all_s))
        why = f"all would take about {all_s:,.0f} s, more than --baseline-seconds {options.baseline_seconds:g}"
    if num_kept == len(items):
        return list(range(num_kept)), f"the same {num_kept:,} requests"
    if options.concurrency is None:
        why += "; in an open loop so short a pass queues less than the whole would"
    indices = evenly_spaced(len(items), num_kept)
    return indices, f"a sample: {num_kept:,} of {len(items):,} requests, evenly spaced; {why}"


def build_report(options: Options, items: Sequence[WorkItem], measured: Measured) -> Summary:
    """Collect the numbers of a run; the environment is added by `run`."""
    with_cache = summarize(measured.with_cache)
    without_cache = None if measured.without_cache is None else summarize(measured.without_cache)
    sampled = [measured.with_cache.outcomes[i] for i in measured.baseline_indices]
    answers = {"compared": 0, "different": 0}
    if measured.without_cache is not None:
        answers = compare_answers(sampled, measured.without_cache.outcomes)
    before, after = measured.stats_before, measured.stats_after
    return {
        "workload": options.workload,
        **with_cache,
        "without_cache": without_cache,
        "speedup": None if without_cache is None else speedup(with_cache, without_cache),
        "model": after.model if after else options.model,
        "device": after.device if after else options.device,
        "answers": answers,
        "baseline_sample": {
            "requests": len(measured.baseline_indices),
            "of": len(items),
            "text": measured.baseline_text,
            "with_cache_ttft_ms": ttft_ms(sampled),  # of the same requests
        },
        "workload_text": options.describe_workload(items),
        "traffic_text": options.describe_traffic(),
        "concurrency": options.concurrency,
        "seed": options.seed,
        "adapters": options.adapters,
        "tenants": options.tenants,
        "public_prefixes": len(public_tokens_of(options, items)),
        # Of an infinite cache, namespace by namespace, in this order.
        "reusable_tokens": count_reusable_tokens(items, public_tokens_of(options, items)),
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


async def _warm_up(call: PrefillCall, options: Options, items: Sequence[WorkItem]) -> float | None:
    """Send unrelated prompts, cached and uncached. Returns prompt tokens/s without cache; None if a request failed."""
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    num_tokens = min(median_prompt_tokens(items), _MAX_WARM_UP_TOKENS)
    prompts = unrelated_prompts(concurrency, num_tokens, options.vocab_size)
    # A second visit is a hit, and half of the first prompt before half of another is a hit with a suffix to compute.
    half = num_tokens // 2
    grafted = prompts[0].copy()
    grafted[half:] = prompts[-1][::-1][half:]
    cached = [WorkItem(0.0, prompts[0]), WorkItem(0.0, prompts[0]), WorkItem(0.0, grafted)]
    uncached = [WorkItem(0.0, prompt) for prompt in prompts]

    async def send(batch: list[WorkItem], use_cache: bool, concurrency: int) -> Pass:
        traffic = Traffic("warmup", use_cache, concurrency, options.timeout_s)
        return await replay(call, batch, [build_message(item.token_ids) for item in batch], traffic)

    await send(cached, True, 1)
    await send(uncached, False, concurrency)
    timed = await send(uncached, False, concurrency)
    if any(outcome.status != OK for outcome in timed.outcomes):
        return None
    return concurrency * num_tokens / timed.wall_s


async def _read_stats(channel: grpc.aio.Channel) -> cache_pb2.StatsResponse | None:
    call = channel.unary_unary(
        "/radixkv.v1.CacheService/Stats",
        request_serializer=cache_pb2.StatsRequest.SerializeToString,
        response_deserializer=cache_pb2.StatsResponse.FromString,
    )
    try:
        answer: cache_pb2.StatsResponse = await call(cache_pb2.StatsRequest(), timeout=_CONNECT_TIMEOUT_S)
        return answer
    except grpc.aio.AioRpcError as error:
        print(f"warning: server statistics are missing: {error.code().name}", file=sys.stderr)
        return None


@contextlib.contextmanager
def _server(options: Options) -> Iterator[str]:
    if options.address is not None:
        yield options.address
        return
    _note(options, f"starting a server with model {options.model or 'tiny'}")
    with tempfile.TemporaryDirectory() as folder:
        settings = options.settings
        if options.adapters:
            from bench.parts.adapters.adapter_files import write_adapters  # imports torch: slow, and needed here only

            settings += tuple(write_adapters(options.model or "tiny", Path(folder), options.adapters))
        server = ServerProcess(serve_command(options.model, options.device, settings))
        with server as address:
            yield address
    if status := server.stop():
        print(f"warning: server: expected exit status 0 after SIGTERM, got {status}", file=sys.stderr)


def _note(options: Options, text: str) -> None:
    if options.progress or sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
