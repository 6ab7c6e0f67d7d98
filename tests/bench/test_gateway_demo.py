"""The gateway demo answers every question although a server is killed, and leaves no process running."""

from __future__ import annotations

import re

import pytest

from bench import gateway_demo
from bench.parts.server_process import ServerProcess
from tests.bench.parts.test_gateway_process import needs_gateway

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.mark.long
@needs_gateway
def test_every_question_is_answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[ServerProcess] = []

    class RecordedServerProcess(ServerProcess):
        def __enter__(self) -> str:
            started.append(self)
            return super().__enter__()

    monkeypatch.setattr(gateway_demo, "ServerProcess", RecordedServerProcess)
    status = gateway_demo.main([])
    lines = capsys.readouterr().out.splitlines()
    assert (status, len(lines)) == (0, 11), lines
    assert re.fullmatch(r"again .* (\d+) of (\d+) prompt tokens cached", lines[3])
    assert re.fullmatch(r"ttft  .* ms without the gateway: medians", lines[5])
    assert re.search(r"48 answers, 0 errors, [5-9]\d% of prompt tokens cached", lines[6])
    assert "48 answers, 0 errors" in lines[9]
    assert lines[10].endswith("every question was answered")
    assert [server.is_running for server in started] == [False, False]


def test_a_server_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway_demo, "_SETTINGS", ("cache.block_size=7",))
    assert gateway_demo.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: server: expected")
    assert "cache.block_size: expected one of 16, 32, 64, got 7" in err
