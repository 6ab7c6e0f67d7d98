"""`bench.replay`, from the command line to the report, against a service that counts exactly."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import bench.replay
from bench.parts import workloads
from bench.parts.load_generator import CallOutcome, Pass
from bench.parts.options import parse_options
from bench.parts.workloads import WorkItem
from bench.replay import Interruption, choose_baseline, main
from radixkv.v1 import prefill_pb2
from tests.bench.fake_service import FakeService, FaultInjector, serving
from tests.cache.walk.reusable_tokens import count_reusable_tokens
from tests.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SMALL = ["--workload", "shared-prefix", "--requests", "12", "--prefix-tokens", "37", "--suffix-tokens", "17"]

# Names that scripts read.
PASS_FIELDS = {
    "requests",
    "errors",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "token_hit_rate",
    "ttft_ms",
    "prompt_tokens_per_s",
}
FIELDS = PASS_FIELDS | {"workload", "without_cache", "speedup", "model", "device", "command", "commit"}


def run(file: Path, service: FakeService, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the report of a replay."""
    with serving(service) as address:
        status = main([*arguments, "--address", address, "--json", str(file)])
    return status, json.loads(file.read_text())


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    return tmp_path / "replay.json"


def fail_even_prompts(num_tokens: int, status: grpc.StatusCode, *, with_cache: bool) -> FaultInjector:
    """Return a function that fails the prompts of one pass whose sum of tokens is even."""

    def fail(request: prefill_pb2.PrefillRequest, response: object) -> grpc.StatusCode | None:
        is_of_pass = request.tenant != "warmup" and request.read_cache == with_cache
        is_even = len(request.token_ids) == num_tokens and sum(request.token_ids) % 2 == 0
        return status if is_of_pass and is_even else None

    return fail


def test_the_report_has_the_documented_fields(json_file: Path) -> None:
    status, report = run(json_file, FakeService(), *SMALL)
    assert status == 0
    assert report.keys() >= FIELDS
    assert report["without_cache"].keys() >= PASS_FIELDS
    assert report["ttft_ms"].keys() == report["without_cache"]["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert report["speedup"].keys() == {"ttft_p50", "prompt_tokens_per_s"}
    assert (report["workload"], report["model"], report["device"]) == ("shared-prefix", "fake", "none")
    assert report["command"].startswith("python -m bench.replay --workload shared-prefix --requests 12 ")


@pytest.mark.parametrize("groups", [1, 3])
def test_the_hit_rate_equals_an_independent_count(json_file: Path, groups: int) -> None:
    arguments = [*SMALL, "--groups", str(groups), "--concurrency", "1"]
    report = run(json_file, FakeService(), *arguments)[1]
    prompts = [item.token_ids.tolist() for item in parse_options(arguments).build_items()]
    assert report["prompt_tokens"] == 12 * 54
    assert report["cached_tokens"] == sum(count_reusable_tokens(prompts))
    assert report["token_hit_rate"] == pytest.approx(sum(count_reusable_tokens(prompts)) / (12 * 54))
    assert report["without_cache"]["cached_tokens"] == 0
    assert report["answers"] == {"compared": 12, "different": 0, "required": 12}


def test_a_second_run_on_the_same_server_starts_cold_again(json_file: Path) -> None:
    service = FakeService()
    first, second = (run(json_file, service, *SMALL, "--concurrency", "1")[1] for _ in range(2))
    assert first["cached_tokens"] == second["cached_tokens"]
    assert first["tenant"] != second["tenant"]


@pytest.mark.parametrize("encode", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_trace_is_replayed(json_file: Path, tmp_path: Path, encode: Callable[[bytes], bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1024 + i, "output_length": 1, "hash_ids": [0, i % 2 + 1, 9 + i]}
        for i in range(1, 7)
    ]
    trace.write_bytes(encode("\n".join(map(json.dumps, lines)).encode()))
    arguments = ["--workload", "mooncake", "--trace", str(trace), "--limit", "5", "--scale", "0.02"]
    status, report = run(json_file, FakeService(), *arguments, "--pace", "trace", "--speedup", "10")
    assert (status, report["requests"], report["prompt_tokens"]) == (0, 5, 5 * 21)  # two blocks of 10 tokens, and one
    # Four requests reuse block 0. Three of these may reuse their second block as well, and each a token by chance.
    assert 10 * 3 + 10 <= report["cached_tokens"] <= 3 * 20 + 10 + 5
    assert report["concurrency"] is None
    assert report["traffic_text"] == "open loop, arrivals of the trace at 10x speed"
    assert report["wall_s"] >= 0.04


def test_a_report_states_that_the_baseline_is_a_sample(json_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(json_file, FakeService(), *SMALL, "--baseline-requests", "5")[1]
    assert (report["requests"], report["without_cache"]["requests"]) == (12, 5)
    assert report["baseline_sample"]["requests"] == 5
    assert report["baseline_sample"]["of"] == 12
    out = capsys.readouterr().out
    assert "a sample: 5 of 12 requests, spread evenly; as requested" in out
    same_ms = report["baseline_sample"]["with_cache_ttft_ms"]["p50"]
    assert f"over these 5 requests only: TTFT p50 {same_ms:,.2f} ms with cache" in out
    assert report["speedup"]["ttft_p50"] == pytest.approx(report["without_cache"]["ttft_ms"]["p50"] / same_ms)
    assert report["partial"] is False


@pytest.mark.parametrize("with_cache", [True, False])
def test_errors_are_counted_shown_and_make_the_run_fail(
    json_file: Path, capsys: pytest.CaptureFixture[str], with_cache: bool
) -> None:
    service = FakeService(fail_even_prompts(54, grpc.StatusCode.RESOURCE_EXHAUSTED, with_cache=with_cache))
    status, report = run(json_file, service, *SMALL)
    summary = report if with_cache else report["without_cache"]
    assert status == 1
    assert 0 < summary["errors"] < 12
    assert summary["errors_by_status"] == {"RESOURCE_EXHAUSTED": summary["errors"]}
    assert summary["prompt_tokens"] == (12 - summary["errors"]) * 54
    assert f"{summary['errors']} RESOURCE_EXHAUSTED" in capsys.readouterr().out


def test_an_answer_that_a_hit_changed_makes_the_run_fail(json_file: Path) -> None:
    def change_answers_of_hits(request: prefill_pb2.PrefillRequest, response: prefill_pb2.PrefillResponse) -> None:
        response.next_token_id = 300 if response.usage.cached_tokens > 0 else 301

    status, report = run(json_file, FakeService(change_answers_of_hits), *SMALL, "--concurrency", "1")
    assert (status, report["errors"], report["answers"]) == (1, 0, {"compared": 12, "different": 11, "required": 12})


def test_a_run_where_every_request_fails_still_reports(json_file: Path) -> None:
    service = FakeService(lambda request, response: grpc.StatusCode.INVALID_ARGUMENT)
    status, report = run(json_file, service, *SMALL)
    assert (status, report["errors"], report["without_cache"]["errors"]) == (1, 12, 12)
    assert report["token_hit_rate"] is None


def pass_over(*indices: int) -> Pass:
    return Pass(tuple(CallOutcome(index, "OK", 0.0, 0.0, 0.1) for index in indices), 1.0, 0.1, num_planned=1000)


def test_the_pass_without_the_cache_sends_the_requests_that_ended_with_it() -> None:
    assert sorted(choose_baseline(parse_options(SMALL), pass_over(*range(10), 12))) == [*range(10), 12]
    assert choose_baseline(parse_options([*SMALL, "--no-baseline"]), pass_over(0, 1)) == []


def test_a_sample_of_a_closed_loop_is_spread_evenly() -> None:
    options = parse_options([*SMALL, "--baseline-requests", "4"])
    assert sorted(choose_baseline(options, pass_over(*range(100)))) == [0, 23, 61, 85]


def test_a_sample_of_an_open_loop_is_the_beginning_of_its_arrivals() -> None:
    options = parse_options([*SMALL, "--rate", "5", "--baseline-requests", "4"])
    assert choose_baseline(options, pass_over(*range(100))) == [0, 1, 2, 3]


def test_a_service_too_slow_to_compare_gives_no_ratio(
    json_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()

    def stall_baseline(request: prefill_pb2.PrefillRequest, response: object) -> None:
        if request.tenant != "warmup" and not request.read_cache and request.token_ids[0] != 0:
            is_over.wait(PATIENCE_S)

    picture = tmp_path / "ttft.png"
    with serving(FakeService(stall_baseline)) as address:
        arguments = [*SMALL, "--requests", "20", "--address", address, "--baseline-seconds", "0.2"]
        status = main([*arguments, "--json", str(json_file), "--plot", str(picture)])
        is_over.set()
    report, out = json.loads(json_file.read_text()), capsys.readouterr().out
    assert (status, report["speedup"], report["requests"]) == (2, None, 20)
    assert report["answers"]["required"] == 16
    assert re.search(r"^NO COMPARISON: \d+ requests were answered .* a ratio needs 16\.", out, re.MULTILINE)
    assert not re.search(r"\dx$", out, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_ends_within_its_time_limit_although_requests_are_never_answered(
    json_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()

    def stall_misses(request: prefill_pb2.PrefillRequest, response: object) -> None:
        if request.tenant != "warmup" and not response.usage.cached_tokens:  # type: ignore[attr-defined]
            is_over.wait(PATIENCE_S)

    with serving(FakeService(stall_misses)) as address:
        assert main([*SMALL, "--address", address, "--time-limit-s", "2", "--json", str(json_file)]) in (0, 2)
        is_over.set()
    captured = capsys.readouterr()
    if json_file.exists():
        report = json.loads(json_file.read_text())
        assert report["partial"] is True
        assert f"PARTIAL RESULT (time limit): {report['requests']} of 12 requests with the cache" in captured.out
    else:
        assert "no request was answered in time: expected a longer --time-limit-s, got 2" in captured.err


def test_a_server_that_fails_to_start_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(bench.replay, "serve_command", lambda *_: command)
    assert main(SMALL) == 2
    assert re.search(r"expected `listening on HOST:PORT`, got its end.*\nno such model", capsys.readouterr().err)


def test_a_server_is_started_and_measured_and_its_times_are_plotted(
    monkeypatch: pytest.MonkeyPatch, json_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[object, ...]] = []

    def serve_command(*arguments: object) -> list[str]:
        commands.append(arguments)
        return [sys.executable, "-m", "tests.bench.fake_service"]

    monkeypatch.setattr(bench.replay, "serve_command", serve_command)
    monkeypatch.chdir(ROOT)
    picture = tmp_path / "ttft.png"
    arguments = [*SMALL, "--model", "m", "--set", "a.b=1", "--json", str(json_file), "--plot", str(picture)]
    assert main(arguments) == 0
    assert commands == [("m", None, ("a.b=1",))]
    report = json.loads(json_file.read_text())
    assert report["server"]["started_here"] is True
    assert report["server"]["settings"] == ["a.b=1"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


# Replays against a fake service that stalls after a number of requests.
INTERRUPTED_REPLAY = """
import sys, bench.replay
pid_file, stalled_file, num_answered = sys.argv[1:4]
command = [sys.executable, "-m", "tests.bench.fake_service", "--pid-file", pid_file]
command += ["--stall-after", num_answered, "--stalled-file", stalled_file]
bench.replay.serve_command = lambda *_: command
sys.exit(bench.replay.main(sys.argv[4:]))
"""
NUM_WARM_UPS = 3 + 4  # requests before the passes are measured


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("signal_number", "status", "num_cached", "num_uncached"),
    [(signal.SIGINT, 130, 20, 0), (signal.SIGINT, 130, 50, 5), (signal.SIGTERM, 143, 50, 20)],
)
def test_a_signal_ends_a_pass_and_the_results_so_far_are_reported(
    signal_number: int, status: int, num_cached: int, num_uncached: int, tmp_path: Path
) -> None:
    pid_file, stalled_file = tmp_path / "pid", tmp_path / "stalled"
    json_file, picture = tmp_path / "replay.json", tmp_path / "ttft.png"
    num_answered = NUM_WARM_UPS + num_cached + num_uncached
    command = [sys.executable, "-c", INTERRUPTED_REPLAY, str(pid_file), str(stalled_file), str(num_answered), *SMALL]
    command += ["--requests", "50", "--json", str(json_file), "--plot", str(picture)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as replay:
        wait_until(lambda: stalled_file.exists() or replay.poll() is not None)
        replay.send_signal(signal_number)
        out, err = replay.communicate(timeout=PATIENCE_S)
    assert replay.returncode == status, err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    report = json.loads(json_file.read_text())
    name = signal.Signals(signal_number).name
    assert (report["partial"], report["interrupted_by"]) == (True, name)
    # When a request stalls, the responses to four earlier ones may not have been received yet.
    assert num_cached - 4 <= report["requests"] <= num_cached
    assert report["requests_planned"] == 50
    text = f"PARTIAL RESULT ({name}): {report['requests']} of 50 requests with the cache"
    assert out.startswith(text)
    assert (report["without_cache"] is not None) == (num_uncached > 0)
    assert (report["speedup"] is not None) == (num_uncached == 20)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_measurement_and_the_previous_handler_gets_the_second(
    signal_number: signal.Signals,
) -> None:
    handled: list[int] = []

    async def run() -> None:
        interruption = Interruption()
        with interruption.handled():
            assert interruption.name is None
            signal.raise_signal(signal_number)
            await interruption.event.wait()
            assert (interruption.name, handled) == (signal_number.name, [])
            signal.raise_signal(signal_number)
            assert handled == [signal_number]

    previous_handler = signal.signal(signal_number, lambda received_number, _: handled.append(received_number))
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal_number, previous_handler)


def test_without_a_signal_the_previous_handlers_are_restored() -> None:
    signal_numbers = (signal.SIGINT, signal.SIGTERM)

    async def run() -> None:
        before = [signal.getsignal(signal_number) for signal_number in signal_numbers]
        with Interruption().handled():
            assert [signal.getsignal(signal_number) for signal_number in signal_numbers] != before
        assert [signal.getsignal(signal_number) for signal_number in signal_numbers] == before

    asyncio.run(run())


def test_requests_take_turns_with_adapters_and_tenants() -> None:
    options = parse_options([*SMALL, "--adapters", "3", "--tenants", "2"])
    items = options.build_items()
    assert [item.adapter for item in items[:4]] == ["bench-0", "bench-1", "bench-2", "bench-0"]
    assert [item.tenant for item in items] == ["-0", "-0", "-0", "-1", "-1", "-1"] * 2
    assert len({(item.adapter, item.tenant) for item in items}) == 6
    by_namespace: dict[tuple[str, str], list[WorkItem]] = {}
    for item in items:
        by_namespace.setdefault((item.adapter, item.tenant), []).append(item)
    reusable_by_namespace = [
        sum(count_reusable_tokens([item.token_ids for item in items_of_namespace]))
        for items_of_namespace in by_namespace.values()
    ]
    assert workloads.count_reusable_tokens(items) == sum(reusable_by_namespace) > 0


def test_public_prefixes_count_as_reusable_for_every_tenant() -> None:
    options = parse_options([*SMALL, "--tenants", "3", "--adapters", "2", "--public-prefix"])
    items = options.build_items()
    public = bench.replay.public_tokens_of(options, items)
    assert {adapter for adapter, _ in public} == {"bench-0", "bench-1"}
    assert workloads.count_reusable_tokens(items, public) > workloads.count_reusable_tokens(items)
    assert workloads.count_reusable_tokens(items, public) >= len(items) * options.prefix_tokens
