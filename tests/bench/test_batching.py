"""All levels of concurrency give the same tokens, and the numbers are those of the rounds."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench import batching

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_levels_of_concurrency_are_measured_over_grpc(tmp_path, capsys):
    file = tmp_path / "batching.json"
    arguments = ["--requests", "3", "--prompt-tokens", "5", "--new-tokens", "4", "--concurrency", "1", "3"]
    batching.main([*arguments, "--rounds", "2", "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    one, three = result["rows"]
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    assert one["ratio"] == 1
    assert three["ratio"] == pytest.approx(three["tokens_per_s"] / one["tokens_per_s"])
    for row in result["rows"]:
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["token_p50_ms"] <= row["token_p99_ms"]
    assert result["command"].startswith("python -m bench.batching --requests 3")
    assert capsys.readouterr().out.count("\n") == 3


def test_tokens_that_depend_on_other_requests_are_not_measured(monkeypatch):
    async def generate_all(call, messages, concurrency):
        return [batching.Generated((concurrency,) * 4, 0.1, 0.1) for _ in messages], 1.0

    monkeypatch.setattr(batching, "generate_all", generate_all)
    messages = batching.build_messages(2, 5, 4, vocab_size=256, seed=0)
    with pytest.raises(AssertionError, match="16 at a time: expected the same tokens"):
        asyncio.run(batching.measure("127.0.0.1:1", messages, [1, 16], rounds=1))


def test_prompts_differ_and_do_not_use_the_cache():
    first, second = batching.build_messages(2, 64, 4, vocab_size=256, seed=0)
    assert first.prefill.token_ids != second.prefill.token_ids
    assert not first.prefill.read_cache
    assert not first.prefill.write_cache
