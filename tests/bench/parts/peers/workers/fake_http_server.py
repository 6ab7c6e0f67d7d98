"""An HTTP server with the APIs of vLLM and llama.cpp. Its k-th token is k; its command line contains the port.

python -m tests.bench.parts.peers.workers.fake_http_server ANYTHING --port PORT ...
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers completions of both APIs."""

    def do_GET(self) -> None:
        self._send_head("text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body["prompt"]:
            self.send_error(400, "empty prompt")
            return
        self._send_head("text/event-stream" if body.get("stream") else "application/json")
        if self.path == "/v1/completions":
            self._answer_openai(body)
        else:
            self._answer_llama_cpp(body)

    def _answer_openai(self, body: dict[str, Any]) -> None:
        tokens = list(range(body["max_tokens"]))
        if not body.get("stream"):
            self.wfile.write(json.dumps({"choices": [{"token_ids": tokens}]}).encode())
            return
        for token in tokens:
            self._send_event({"choices": [{"token_ids": [token]}]})
        self._send_event({"choices": []})
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer_llama_cpp(self, body: dict[str, Any]) -> None:
        for token in range(body["n_predict"]):
            self._send_event({"tokens": [token], "stop": False})
        self._send_event({"tokens": [], "stop": True, "timings": {"cache_n": len(body["prompt"]) - 1}})

    def _send_event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send_head(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # tests send requests at the same time


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Server(("127.0.0.1", port), Handler).serve_forever()
