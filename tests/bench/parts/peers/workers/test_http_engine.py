"""An HTTP engine is started, called and stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.parts.peers.workers.http_engine import HttpEngine, free_port

SERVER = str(Path(__file__).with_name("fake_http_server.py"))


def test_an_engine_streams_events_and_posts() -> None:
    port = free_port()
    engine = HttpEngine([sys.executable, SERVER, "--port", str(port)], port)
    try:
        events = list(engine.stream("/completion", {"prompt": [7, 8], "n_predict": 2}))
        assert [event["tokens"] for event in events] == [[0], [1], []]
        answer = engine.post("/v1/completions", {"prompt": [7], "max_tokens": 1})
        assert answer["choices"][0]["token_ids"] == [0]
        with pytest.raises(RuntimeError, match="expected status 200, got 400"):
            engine.post("/v1/completions", {"prompt": []})
    finally:
        engine.close()
        engine.close()  # has no effect
    with pytest.raises(OSError):
        engine.post("/completion", {"prompt": [1]})


def test_a_server_that_ends_before_it_is_ready_is_reported() -> None:
    with pytest.raises(RuntimeError, match="got exit status 3"):
        HttpEngine([sys.executable, "-c", "raise SystemExit(3)"], free_port())
