"""The gateway demo answers every question although a server is killed, and leaves no process running."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bench import gateway_demo
from bench.gateway_demo import time_first_tokens
from bench.parts.server_process import ServerProcess
from radixkv.errors import ConfigError
from tests.bench.parts.test_gateway_process import needs_gateway
from tests.service.command_line import fake_service

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


@pytest.mark.long
@pytest.mark.parametrize(("status", "body"), [(503, b"no workers\n"), (200, b'{"text": "not streamed"}\n')])
def test_an_answer_that_is_no_stream_is_an_error(status: int, body: bytes) -> None:
    class FakeGateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), FakeGateway) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ConfigError, match=f"gateway: expected a streamed answer, got {status}"):
            time_first_tokens(f"http://127.0.0.1:{server.server_port}", "127.0.0.1:1", "m", 1)
        thread.join()


@pytest.mark.long
def test_first_tokens_over_the_gateway_and_without_it_are_timed() -> None:
    class FakeGateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "20")
            self.end_headers()
            self.wfile.write(b"data: {}\n\ndata: {}\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with fake_service() as (_, address), HTTPServer(("127.0.0.1", 0), FakeGateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        times = time_first_tokens(f"http://127.0.0.1:{server.server_port}", address, "m", 2)
        server.shutdown()
        thread.join()
    assert times.gateway_ms > 0
    assert times.direct_ms > 0
