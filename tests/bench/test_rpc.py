"""Both servers get the same calls, and only correct responses are timed."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench import rpc
from bench.parts.null_service import NEXT_TOKEN_ID
from radixkv.v1 import prefill_pb2

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_both_servers_are_measured_in_turn(tmp_path, capsys):
    file = tmp_path / "rpc.json"
    arguments = ["--tokens", "128", "--concurrency", "2", "--rounds", "1", "--seconds", "0.05"]
    rpc.main([*arguments, "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["prompt_tokens"], row["kind"], row["concurrency"]) for row in result["rows"]] == [
        (128, "hit", 2),
        (128, "miss", 2),
    ]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["service"]["calls_per_s"] / row["echo"]["calls_per_s"])
        for name in rpc.SERVERS:
            assert 0 < row[name]["p50_ms"] <= row[name]["p99_ms"]
    assert result["settings"] == ["engine.max_step_tokens=8192"]
    assert result["command"].startswith("python -m bench.rpc --tokens 128")
    assert "128 miss" in capsys.readouterr().out


def test_misses_differ_from_the_first_block_on():
    requests = rpc.Requests(200, seed=0)
    prompts = [prefill_pb2.PrefillRequest.FromString(make()) for make in (requests.hit, *[requests.miss] * 50)]
    first_blocks = {tuple(prompt.token_ids[: rpc._COUNTER_TOKENS]) for prompt in prompts}
    assert len(first_blocks) == len(prompts)
    assert {len(prompt.token_ids) for prompt in prompts} == {200}
    assert requests.hit() == requests.hit()


def endpoint_with(cached_tokens: int, next_token_id: int = NEXT_TOKEN_ID, padding: str = "") -> rpc.Endpoint:
    """Return an endpoint whose responses all have these values."""
    usage = prefill_pb2.Usage(prompt_tokens=128, cached_tokens=cached_tokens, computed_tokens=128 - cached_tokens)
    response = prefill_pb2.PrefillResponse(usage=usage, next_token_id=next_token_id, request_id=padding)

    async def call(request: bytes, /, *, timeout: float) -> bytes:
        return response.SerializeToString()

    return rpc.Endpoint(call, process=None)


@pytest.mark.parametrize(
    ("service", "echo", "message"),
    [
        (endpoint_with(127, next_token_id=1), endpoint_with(127), "next token"),
        (endpoint_with(64), endpoint_with(64), "a hit reuses 64"),
        (endpoint_with(127), endpoint_with(127), "a miss reuses 127"),
        (endpoint_with(127), endpoint_with(127, padding="x" * 100), "answers of"),
    ],
)
def test_wrong_answers_are_not_timed(service, echo, message):
    with pytest.raises(AssertionError, match=message):
        asyncio.run(rpc.check(service, echo, rpc.Requests(128, 0), 128))


def test_the_shortest_miss_is_a_whole_message():
    message = prefill_pb2.PrefillRequest.FromString(rpc.Requests(rpc._COUNTER_TOKENS, seed=0).miss())
    assert len(message.token_ids) == rpc._COUNTER_TOKENS
