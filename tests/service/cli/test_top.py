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
from tests.fakes import publish
from tests.patience import PATIENCE_S
from tests.service.command_line import fake_service, run_cli
from tests.service.fake_engine import FakeEngine
from tests.service.server.identity.certificates import TOKENS, Papers
from tests.service.serving import serve_and_call


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    publish(engine.cache, "abcdefgh", Namespace("model", "a"))
    publish(engine.cache, "xyz", Namespace("model", "b"))
    return engine


def test_a_tenant_may_look_too(tmp_path, capsys, engine):
    papers = Papers(tmp_path)
    file = tmp_path / "acme.token"
    file.write_text(TOKENS["acme"])
    publish(engine.cache, "abc", Namespace("model", "acme"))
    call = ["top", "--once", "--tls-ca", str(papers.ca_file), "--token-file", str(file)]
    assert serve_and_call(engine, lambda address: main([*call, "--address", address]), **papers.tls) == 0
    out = capsys.readouterr().out
    assert re.search(r"^acme +\d", out, re.MULTILINE)
    assert re.search(r"^hottest segments: 1, ", out, re.MULTILINE)
    assert "hit rate  " not in out


def test_one_screen_for_scripts(capsys, engine):
    code, out, err = run_cli(capsys, engine, "top", "--once")
    assert (code, err) == (0, "")
    assert out.startswith("radixkv  fake on cpu, up 2s\n")
    assert re.search(r"^hit rate +60\.0 % +60\.0 %$", out, re.MULTILINE)
    assert re.search(r"^hottest segments: 2 of 2, 2 compared$", out, re.MULTILINE)
    assert "\x1b" not in out


def test_one_screen_as_json(capsys, engine):
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


def test_a_service_that_is_not_there_is_one_line(capsys):
    assert main(["top", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().err.startswith("radixkv: UNAVAILABLE: ")


def test_a_terminal_is_redrawn_and_left_as_it_was():
    with fake_service() as (_, address):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 12, 70, 0, 0))
        command = [sys.executable, "-m", "radixkv.service", "top", "--address", address, "--interval", "0.05"]
        environment = {name: text for name, text in os.environ.items() if name not in ("LINES", "COLUMNS")}
        process = subprocess.Popen(
            command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment, preexec_fn=_end_at_interrupts
        )
        os.close(theirs)
        try:
            drawn = read_until(ours, lambda text: text.count("\x1b[H") >= 3)
            process.send_signal(signal.SIGINT)
            drawn += read_until(ours, lambda text: "\x1b[?1049l" in text)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert drawn.startswith("\x1b[?1049h\x1b[?25l\x1b[Hradixkv  fake on cpu")
    _, second = re.findall(r"\x1b\[H(.*?)\x1b\[J", drawn, re.DOTALL)[:2]
    lines = second.replace("\x1b[K", "").splitlines()
    assert len(lines) == 11, "the last line of the terminal stays free, or it would scroll"
    assert max(map(len, lines)) == 70


def _end_at_interrupts() -> None:
    """Let SIGINT end this process, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_until(terminal: int, is_enough) -> str:
    """Read what a program writes to its terminal, until it is enough."""
    text, end_s = "", time.monotonic() + PATIENCE_S
    while not is_enough(text) and time.monotonic() < end_s:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                text += os.read(terminal, 65_536).decode()
            except OSError:  # the program has ended
                break
    assert is_enough(text), text
    return text
