"""From the command line to the report, against a service that counts exactly."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import bench.replay
from bench.parts.adapters import reusable_tokens
from bench.parts.adapters.adapter_files import write_adapters
from bench.parts.options import parse_options
from bench.parts.workloads import WorkItem
from bench.replay import choose_baseline, main
from radixkv.config import ModelConfig
from radixkv.model.adapters.adapter_files import read_adapter
from radixkv.model.loading import load_model
from radixkv.v1 import prefill_pb2
from tests.bench.fake_service import FakeService, Trouble, serving
from tests.cache.walk.reusable_tokens import count_reusable_tokens
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = ["--workload", "shared-prefix", "--requests", "12", "--prefix-tokens", "37", "--suffix-tokens", "17"]

# The names that scripts and acceptance checks are written against.
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
    with serving(service) as address:
        status = main([*arguments, "--address", address, "--json", str(file)])
    return status, json.loads(file.read_text())


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    return tmp_path / "replay.json"


def failing(num_tokens: int, status: grpc.StatusCode, *, with_cache: bool) -> Trouble:
    """Fail requests whose first token is even, of one pass."""

    def trouble(request: prefill_pb2.PrefillRequest, response: object) -> grpc.StatusCode | None:
        is_hit = len(request.token_ids) == num_tokens and sum(request.token_ids) % 2 == 0
        return status if is_hit and request.tenant != "warmup" and request.read_cache == with_cache else None

    return trouble


def test_the_report_has_the_promised_fields(json_file: Path) -> None:
    status, report = run(json_file, FakeService(), *SMALL)
    assert status == 0
    assert report.keys() >= FIELDS
    assert report["without_cache"].keys() >= PASS_FIELDS
    assert report["ttft_ms"].keys() == report["without_cache"]["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert report["speedup"].keys() == {"ttft_p50", "prompt_tokens_per_s"}
    assert (report["workload"], report["model"], report["device"]) == ("shared-prefix", "fake", "none")
    assert report["command"].startswith("python -m bench.replay --workload shared-prefix --requests 12 ")


def test_the_report_says_where_and_how_it_was_measured(json_file: Path) -> None:
    report = run(json_file, FakeService(), *SMALL, "--seed", "3", "--concurrency", "2")[1]
    assert (report["seed"], report["concurrency"]) == (3, 2)
    assert report["machine"].keys() >= {"cpu", "cores", "memory_gib", "gpu"}
    assert report["versions"].keys() >= {"python", "torch", "grpcio", "radixkv"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["date"])
    assert report["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", report["commit"])
    assert report["server"]["capacity_tokens"] == 6400


@pytest.mark.parametrize("groups", [1, 3])
def test_the_hit_rate_is_the_independent_count(json_file: Path, groups: int) -> None:
    arguments = [*SMALL, "--groups", str(groups), "--concurrency", "1"]
    report = run(json_file, FakeService(), *arguments)[1]
    prompts = [item.token_ids.tolist() for item in parse_options(arguments).build_items()]
    assert report["prompt_tokens"] == 12 * 54
    assert report["cached_tokens"] == sum(count_reusable_tokens(prompts))
    assert report["token_hit_rate"] == pytest.approx(sum(count_reusable_tokens(prompts)) / (12 * 54))
    assert report["without_cache"]["cached_tokens"] == 0
    assert report["answers"] == {"compared": 12, "different": 0}


def test_a_second_run_on_the_same_server_starts_cold_again(json_file: Path) -> None:
    service = FakeService()
    first, second = (run(json_file, service, *SMALL, "--concurrency", "1")[1] for _ in range(2))
    assert first["cached_tokens"] == second["cached_tokens"]
    assert first["tenant"] != second["tenant"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_is_replayed(json_file: Path, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1024 + i, "output_length": 1, "hash_ids": [0, i % 2 + 1, 9 + i]}
        for i in range(1, 7)
    ]
    trace.write_bytes(pack("\n".join(map(json.dumps, lines)).encode()))
    arguments = ["--workload", "mooncake", "--trace", str(trace), "--limit", "5", "--scale", "0.02"]
    status, report = run(json_file, FakeService(), *arguments, "--pace", "trace", "--speedup", "10")
    assert (status, report["requests"], report["prompt_tokens"]) == (0, 5, 5 * 21)
    assert 10 * 3 + 10 <= report["cached_tokens"] <= 3 * 20 + 10 + 5
    assert report["concurrency"] is None
    assert report["traffic_text"] == "open loop, arrivals of the trace at 10x speed"
    assert report["wall_s"] >= 0.04


def test_poisson_arrivals_are_sent_in_an_open_loop(json_file: Path) -> None:
    status, report = run(json_file, FakeService(), *SMALL, "--rate", "200")
    assert status == 0
    assert report["wall_s"] > 0.02
    assert report["send_late_ms"]["p50"] is not None
    assert "Poisson arrivals at 200 requests/s" in report["traffic_text"]


def test_a_sample_is_stated(json_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(json_file, FakeService(), *SMALL, "--baseline-requests", "5")[1]
    assert (report["requests"], report["without_cache"]["requests"]) == (12, 5)
    assert report["baseline_sample"]["requests"] == 5
    assert report["baseline_sample"]["of"] == 12
    out = capsys.readouterr().out
    assert "a sample: 5 of 12 requests, evenly spaced; as asked" in out
    same_ms = report["baseline_sample"]["with_cache_ttft_ms"]["p50"]
    assert f"these 5 alone: TTFT p50 {same_ms:,.2f} ms with cache" in out


def test_without_a_baseline_there_is_nothing_to_compare(json_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(json_file, FakeService(), *SMALL, "--no-baseline")
    assert (status, report["without_cache"], report["speedup"]) == (0, None, None)
    assert "without cache" not in capsys.readouterr().out


@pytest.mark.parametrize("with_cache", [True, False])
def test_errors_are_counted_shown_and_make_the_run_fail(
    json_file: Path, capsys: pytest.CaptureFixture[str], with_cache: bool
) -> None:
    service = FakeService(failing(54, grpc.StatusCode.RESOURCE_EXHAUSTED, with_cache=with_cache))
    status, report = run(json_file, service, *SMALL)
    summary = report if with_cache else report["without_cache"]
    assert status == 1
    assert 0 < summary["errors"] < 12
    assert summary["errors_by_status"] == {"RESOURCE_EXHAUSTED": summary["errors"]}
    assert summary["prompt_tokens"] == (12 - summary["errors"]) * 54
    assert f"{summary['errors']} RESOURCE_EXHAUSTED" in capsys.readouterr().out


def test_an_answer_that_a_hit_changed_makes_the_run_fail(json_file: Path) -> None:
    def trouble(request: prefill_pb2.PrefillRequest, response: prefill_pb2.PrefillResponse) -> None:
        response.next_token_id = 300 if response.usage.cached_tokens > 0 else 301

    status, report = run(json_file, FakeService(trouble), *SMALL, "--concurrency", "1")
    assert (status, report["errors"], report["answers"]) == (1, 0, {"compared": 12, "different": 11})


def test_a_run_where_every_request_fails_still_reports(json_file: Path) -> None:
    service = FakeService(lambda request, response: grpc.StatusCode.INVALID_ARGUMENT)
    status, report = run(json_file, service, *SMALL)
    assert (status, report["errors"], report["without_cache"]["errors"]) == (1, 12, 12)
    assert report["token_hit_rate"] is None


def test_the_table_shows_both_passes_and_their_ratio(capsys: pytest.CaptureFixture[str], json_file: Path) -> None:
    run(json_file, FakeService(), *SMALL, "--concurrency", "1")
    out = capsys.readouterr().out
    assert re.search(r"^ +with cache +without cache +ratio$", out, re.MULTILINE)
    assert re.search(r"^requests +12 +12$", out, re.MULTILINE)
    assert re.search(r"^prompt tokens +648 +648$", out, re.MULTILINE)
    assert re.search(r"^token hit rate +\d\d\.\d\d% +0\.00%$", out, re.MULTILINE)
    assert re.search(r"^TTFT p50, ms +[\d.]+ +[\d.]+ +[\d.]+x$", out, re.MULTILINE)
    assert "12 compared" in out
    assert "new for this run" in out


def items_of(num_tokens: Sequence[int], last_arrival_s: float = 0.0) -> list[WorkItem]:
    return [WorkItem(last_arrival_s, np.zeros(n, np.uint32)) for n in num_tokens]


def test_the_baseline_is_everything_when_time_allows() -> None:
    options = parse_options([*SMALL, "--baseline-seconds", "10"])
    assert choose_baseline(options, items_of([100] * 10), 100.0) == (list(range(10)), "the same 10 requests")
    assert choose_baseline(options, items_of([100] * 10), None)[0] == list(range(10))


def test_the_baseline_is_a_sample_when_time_does_not_allow_more() -> None:
    options = parse_options([*SMALL, "--baseline-seconds", "10"])
    indices, text = choose_baseline(options, items_of([100] * 10), 50.0)
    assert indices == [0, 2, 4, 6, 8]
    assert text.startswith("a sample: 5 of 10 requests, evenly spaced; all would take about 20 s")
    assert choose_baseline(options, items_of([100] * 10), 1e-9)[0] == [0]


def test_only_an_open_loop_takes_as_long_as_its_arrivals() -> None:
    items = items_of([100] * 10, last_arrival_s=40.0)
    open_loop = parse_options([*SMALL, "--baseline-seconds", "10", "--rate", "5"])
    assert len(choose_baseline(open_loop, items, 1e9)[0]) == 2
    closed = parse_options([*SMALL, "--baseline-seconds", "10"])
    assert choose_baseline(closed, items, 1e9) == (list(range(10)), "the same 10 requests")


def test_a_server_that_is_not_there_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.replay, "_CONNECT_TIMEOUT_S", 0.3)
    assert main([*SMALL, "--address", "127.0.0.1:1"]) == 2
    assert "error: server 127.0.0.1:1: expected a connection within 0.3 s" in capsys.readouterr().err


def test_a_bad_trace_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--workload", "mooncake", "--trace", str(tmp_path / "no"), "--address", "127.0.0.1:1"]) == 2
    assert "expected a readable file" in capsys.readouterr().err


def test_a_server_that_fails_to_start_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(bench.replay, "serve_command", lambda *_: command)
    assert main(SMALL) == 2
    assert re.search(r"expected `listening on HOST:PORT`, got its end.*\nno such model", capsys.readouterr().err)


def test_a_server_is_started_measured_drawn_and_stopped(
    monkeypatch: pytest.MonkeyPatch, json_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[object, ...]] = []

    def serve_command(*given: object) -> list[str]:
        commands.append(given)
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


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_server_too(signal_number: int, status: int, tmp_path: Path) -> None:
    script = """
import signal, sys, bench.replay
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
fake = [sys.executable, "-m", "tests.bench.fake_service", "--delay-s", "0.05", "--pid-file", sys.argv[1]]
bench.replay.serve_command = lambda *_: fake
sys.exit(bench.replay.main(sys.argv[2:]))
"""
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", script, str(pid_file), *SMALL, "--requests", "10000", "--progress"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as replaying:
        assert replaying.stderr is not None
        seen = b""
        while b"with cache" not in seen:  # the passes have begun
            seen += replaying.stderr.read1() or pytest.fail(seen.decode())
        replaying.send_signal(signal_number)
        assert replaying.wait(PATIENCE_S) == status
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_measuring_leaves_no_task_behind() -> None:
    async def scenario(address: str) -> int:
        options = parse_options(SMALL)
        items = options.build_items()
        messages = [bench.replay.build_message(item.token_ids) for item in items]
        await bench.replay.measure(address, options, items, messages)
        return len(asyncio.all_tasks())

    with serving(FakeService()) as address:
        assert asyncio.run(scenario(address)) == 1


def test_a_sample_of_an_open_loop_says_that_it_queues_less() -> None:
    options = parse_options([*SMALL, "--rate", "5", "--baseline-requests", "2"])
    assert "queues less" in choose_baseline(options, items_of([100] * 10), None)[1]


def test_requests_take_turns_with_adapters_and_tenants() -> None:
    options = parse_options([*SMALL, "--adapters", "3", "--tenants", "2"])
    items = options.build_items()
    assert [item.adapter for item in items[:4]] == ["bench-0", "bench-1", "bench-2", "bench-0"]
    assert [item.tenant for item in items] == ["-0", "-0", "-0", "-1", "-1", "-1"] * 2
    assert len({(item.adapter, item.tenant) for item in items}) == 6
    by_namespace: dict[tuple[str, str], list[WorkItem]] = {}
    for item in items:
        by_namespace.setdefault((item.adapter, item.tenant), []).append(item)
    each = [sum(count_reusable_tokens([item.token_ids for item in some])) for some in by_namespace.values()]
    assert reusable_tokens.count_reusable_tokens(items) == sum(each) > 0


def test_tenants_are_told_apart_by_a_service(json_file: Path) -> None:
    status, report = run(json_file, FakeService(), *SMALL, "--tenants", "3", "--concurrency", "1")
    assert (status, report["tenants"]) == (0, 3)
    assert report["cached_tokens"] == report["reusable_tokens"] >= 9 * 37  # own tokens may begin alike by chance


def test_public_prefixes_count_as_reusable_for_every_tenant() -> None:
    options = parse_options([*SMALL, "--tenants", "3", "--adapters", "2", "--public-prefix"])
    items = options.build_items()
    public = bench.replay.public_tokens_of(options, items)
    assert {adapter for adapter, _ in public} == {"bench-0", "bench-1"}
    assert reusable_tokens.count_reusable_tokens(items, public) > reusable_tokens.count_reusable_tokens(items)
    assert reusable_tokens.count_reusable_tokens(items, public) >= len(items) * options.prefix_tokens


def test_a_service_without_public_prefixes_is_named(json_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeService()) as address:
        assert bench.replay.main([*SMALL, "--address", address, "--public-prefix"]) == 2
    assert "--public-prefix: UNIMPLEMENTED" in capsys.readouterr().err


def test_adapters_that_are_written_are_read(tmp_path: Path) -> None:
    model = load_model(ModelConfig(device="cpu", max_adapters=2))
    settings = write_adapters("tiny", tmp_path, 2)
    assert [setting.partition("=")[0] for setting in settings] == ["adapters.bench-0.path", "adapters.bench-1.path"]
    first, second = (read_adapter(setting.partition("=")[2], model) for setting in settings)
    assert first.rank == 8
    assert first.digest != second.digest
