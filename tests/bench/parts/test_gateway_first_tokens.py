"""First tokens over a gateway are timed only if it streams.

`test_gateway_demo.py` measures them over a real gateway.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bench.parts.gateway_first_tokens import time_first_tokens
from radixkv.errors import ConfigError
from tests.service.command_line import fake_service

pytestmark = pytest.mark.long


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
