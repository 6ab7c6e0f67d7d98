from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from radixkv.namespace import Namespace
from radixkv.service.cli.main import main
from radixkv.service.cli.top import StatsSample, screen
from radixkv.v1.cache_pb2 import (
    BlockStats,
    ListSegmentsResponse,
    RequestStats,
    Segment,
    StatsResponse,
    TenantStats,
    TimeStats,
    TokenStats,
)
from tests.fakes import publish
from tests.patience import PATIENCE_S
from tests.service.command_line import fake_service, run_cli
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.serving import serve_and_call


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    publish(engine.cache, "abcdefgh", Namespace("model", "a"))
    publish(engine.cache, "xyz", Namespace("model", "b"))
    return engine


def test_a_tenant_sees_its_own_statistics_in_top(tmp_path, capsys, engine):
    credential_files = CredentialFiles(tmp_path)
    file = tmp_path / "acme.token"
    file.write_text(TOKENS["acme"])
    publish(engine.cache, "abc", Namespace("model", "acme"))
    call = ["top", "--once", "--tls-ca", str(credential_files.ca_file), "--token-file", str(file)]
    assert serve_and_call(engine, lambda address: main([*call, "--address", address]), **credential_files.tls) == 0
    out = capsys.readouterr().out
    assert re.search(r"^acme +\d", out, re.MULTILINE)
    assert re.search(r"^hottest segments: 1, ", out, re.MULTILINE)
    assert "hit rate  " not in out


def test_the_option_once_prints_one_screen(capsys, engine):
    code, out, err = run_cli(capsys, engine, "top", "--once")
    assert (code, err) == (0, "")
    assert out.startswith("radixkv  fake on cpu, up 2s\n")
    assert re.search(r"^hit rate +60\.0 % +60\.0 %$", out, re.MULTILINE)
    assert re.search(r"^hottest segments: 2 of 2, 2 compared$", out, re.MULTILINE)
    assert re.search(r"^build-42 +acme +7 +1 +12s +awaits a tool$", out, re.MULTILINE)
    assert "\x1b" not in out


def test_one_screen_is_one_json_object(capsys, engine):
    answer = json.loads(run_cli(capsys, engine, "top", "--once", "--json", "--tenant", "b")[1])
    assert answer["stats"]["blocks"]["total"] == 10
    assert [(each["tenant"], each["num_tokens"]) for each in answer["hottest"]["segments"]] == [("b", 3)]


def test_screens_follow_each_other_where_there_is_no_terminal(capsys, engine, monkeypatch):
    pauses_s = []

    def sleep(pause_s):
        pauses_s.append(pause_s)
        if len(pauses_s) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("radixkv.service.cli.top.time", SimpleNamespace(sleep=sleep))
    code, out, _ = run_cli(capsys, engine, "top", "--interval", "0.5", "--json")
    assert (code, pauses_s) == (0, [0.5] * 3)
    assert [json.loads(line)["stats"]["model"] for line in out.splitlines()] == ["fake"] * 3


def test_an_unreachable_service_is_reported_in_one_line(capsys):
    assert main(["top", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().err.startswith("radixkv: UNAVAILABLE: ")


def test_a_terminal_is_redrawn_and_left_as_it_was():
    with fake_service() as (_, address):
        terminal, program_terminal = pty.openpty()
        fcntl.ioctl(program_terminal, termios.TIOCSWINSZ, struct.pack("4H", 12, 70, 0, 0))
        command = [sys.executable, "-m", "radixkv.service", "top", "--address", address, "--interval", "0.05"]
        environment = {name: text for name, text in os.environ.items() if name not in ("LINES", "COLUMNS")}
        process = subprocess.Popen(
            command,
            stdout=program_terminal,
            stderr=program_terminal,
            stdin=program_terminal,
            env=environment,
            preexec_fn=_end_at_interrupts,
        )
        os.close(program_terminal)
        try:
            drawn = read_until(terminal, lambda text: text.count("\x1b[H") >= 3)
            process.send_signal(signal.SIGINT)
            drawn += read_until(terminal, lambda text: "\x1b[?1049l" in text)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
    assert drawn.startswith("\x1b[?1049h\x1b[?25l\x1b[Hradixkv  fake on cpu")
    _, second = re.findall(r"\x1b\[H(.*?)\x1b\[J", drawn, re.DOTALL)[:2]
    lines = second.replace("\x1b[K", "").splitlines()
    assert len(lines) == 11, "the last line of the terminal stays free, or it would scroll"
    assert max(map(len, lines)) == 70


def _end_at_interrupts() -> None:
    """Let SIGINT end this process, also if a shell started the tests in the background, where it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_until(terminal: int, is_enough) -> str:
    """Return what a program writes to its terminal until `is_enough(text)`."""
    text, end_s = "", time.monotonic() + PATIENCE_S
    while not is_enough(text) and time.monotonic() < end_s:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                text += os.read(terminal, 65_536).decode()
            except OSError:  # the program has ended
                break
    assert is_enough(text), text
    return text


def sample(
    uptime_s: float, prompt: int, cached: int, first_tokens: tuple[int, int, int] = (0, 0, 0), epoch: int = 1
) -> StatsSample:
    stats = StatsResponse(
        model="tiny",
        device="cpu",
        epoch=epoch,
        uptime_s=uptime_s,
        block_size=64,
        blocks=BlockStats(total=100, free=40, leased=10, published=50, pinned=3, retained=2),
        requests=RequestStats(running=1, waiting=2, following=3, finished=prompt // 100),
        tokens=TokenStats(prompt=prompt, cached=cached, generated=prompt // 10),
        tenants=[TenantStats(tenant="ac\x1bme", cached_blocks=30, evicted_blocks=4, hit_tokens=3, miss_tokens=1)],
        first_tokens=TimeStats(bounds_s=[0.1, 0.2], counts=first_tokens, sum_s=1.0),
    )
    hottest = ListSegmentsResponse(
        segments=[Segment(segment_id=7, num_tokens=64, num_blocks=1, num_uses=5, heat=6.0)],
        total_segments=9,
        compared_segments=9,
    )
    return StatsSample(stats, hottest)


def words_of_line(lines: list[str], name: str) -> list[str]:
    """Return the words of the first line that starts with `name`."""
    return next(line for line in lines if line.startswith(name)).split()


def test_the_first_screen_shows_the_rates_since_the_start() -> None:
    lines = screen(sample(100.0, 1000, 250, (2, 2, 0)), None)
    assert lines[0] == "radixkv  tiny on cpu, up 2m"
    assert lines[1] == "requests  1 running, 5 waiting, 10 finished, 0 failed"
    assert words_of_line(lines, "hit rate") == ["hit", "rate", "25.0", "%", "25.0", "%"]
    assert words_of_line(lines, "prompt tokens") == ["prompt", "tokens", "10/s", "1000"]
    # The buckets end at 100 ms and 200 ms, with two requests each; percentiles are interpolated within a bucket.
    assert " ".join(words_of_line(lines, "first token")) == "first token p50 100 ms, p99 198 ms p50 100 ms, p99 198 ms"


def test_a_screen_shows_the_tiers_below_the_device() -> None:
    now = sample(100.0, 1000, 250)
    now.stats.tiers.add(tier="host", is_working=True, blocks=7, loaded_blocks=2, saved_blocks=9)
    now.stats.tiers.add(tier="redis", is_working=False)
    now.stats.tenants[0].stored_blocks["host"] = 5
    lines = screen(now, None)
    assert "in host  7 blocks; 2 loaded, 9 saved so far" in lines
    assert "in redis  shared; 0 loaded, 0 saved so far; disabled" in lines
    head, row = (line.split() for line in lines[lines.index("") :] if line.strip().startswith(("tenant", "ac")))
    assert head == ["tenant", "blocks", "pinned", "retained", "evicted", "in", "host", "in", "redis", "hit", "rate"]
    assert row[1:] == ["30", "0", "0", "4", "5", "0", "75.0", "%"]


def test_later_screens_show_what_happened_since_the_previous_one() -> None:
    before, now = sample(100.0, 1000, 250, (2, 2, 0)), sample(102.0, 1200, 400, (2, 4, 0))
    lines = screen(now, before)
    assert words_of_line(lines, "hit rate")[2:] == ["75.0", "%", "33.3", "%"]
    assert words_of_line(lines, "prompt tokens")[2:] == ["100/s", "1200"]
    assert words_of_line(lines, "generated")[1:] == ["10/s", "120"]
    assert words_of_line(lines, "requests ")[1:] == ["1", "running,", "5", "waiting,", "12", "finished,", "0", "failed"]
    # Both requests since the previous screen are in the bucket from 100 ms to 200 ms.
    assert " ".join(words_of_line(lines, "first token")[:6]) == "first token p50 150 ms, p99"


def test_a_quiet_service_has_no_rates() -> None:
    now = sample(102.0, 1000, 250)
    assert words_of_line(screen(now, now), "hit rate")[2:] == ["-", "25.0", "%"]
    assert words_of_line(screen(now, now), "first token")[2:] == ["-", "-"]


def test_a_restarted_service_is_not_compared_with_its_past() -> None:
    lines = screen(sample(2.0, 100, 50, epoch=2), sample(100.0, 1000, 250))
    assert "since the start" in lines[3]
    assert words_of_line(lines, "prompt tokens")[2:] == ["50/s", "100"]


@pytest.mark.parametrize("num_columns", [62, 102])
def test_the_bar_has_the_blocks_by_state(num_columns: int) -> None:
    lines = screen(sample(1.0, 0, 0), None, num_columns)
    (bar,) = (line for line in lines if line.startswith("["))
    cells = num_columns - 2
    assert len(bar) == num_columns
    assert [bar.count(mark) for mark in "#+."] == [cells * 50 // 100, cells * 10 // 100, cells * 40 // 100]


def test_tenants_and_segments_are_in_tables() -> None:
    lines = screen(sample(1.0, 0, 0), None)
    assert words_of_line(lines, "ac") == ["ac\\x1bme", "30", "0", "0", "4", "75.0", "%"]
    assert "hottest segments: 1 of 9, 9 compared" in lines
    assert lines[-1].split() == ["7", "-", "(none)", "0", "64", "1", "5", "0s", "6.0"]


def test_a_tenant_sees_its_own_line_and_segments_only() -> None:
    now = sample(100.0, 0, 0)
    for field in ("requests", "tokens", "first_tokens"):
        now.stats.ClearField(field)
    lines = screen(now, now)
    assert lines[:2] == ["radixkv  tiny on cpu, up 2m", ""]
    assert lines[2].startswith("tenant ")
    assert words_of_line(lines, "ac")[:2] == ["ac\\x1bme", "30"]
    assert lines[5] == "hottest segments: 1 of 9, 9 compared"


def test_a_screen_fits_into_a_terminal() -> None:
    lines = screen(sample(1.0, 0, 0), None, 30, 8)
    assert len(lines) == 8
    assert max(map(len, lines)) <= 30
