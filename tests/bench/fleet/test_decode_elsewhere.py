from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fleet import decode_elsewhere

pytestmark = [pytest.mark.usefixtures("forked_servers"), pytest.mark.long]


def test_answers_are_compared_and_both_streams_carry_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--generations", "4", "--long-prompt-tokens", "256", "--rounds", "1"]
    assert decode_elsewhere.main([*sizes, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["generations"], result["different"]) == (4, 0)
    assert 0 < result["fetched_tokens"] < result["prompt_tokens"]
    assert result["bytes"] > 4 * 100_000, "the K/V of four blocks"
    assert capsys.readouterr().out.startswith("4 generations, 0 differ")


def test_different_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeServer:
        """A client whose generations consist of one given token, and whose prefills hold a lease."""

        def __init__(self, token_id: int) -> None:
            self.token_id = token_id

        def __getattr__(self, name: str) -> object:
            return lambda *_, **__: type("Held", (), {"lease_id": "a", "epoch": 1})

    monkeypatch.setattr(decode_elsewhere, "_generate", lambda client, prompt, options: ([client.token_id], 0))
    assert decode_elsewhere._compare(FakeServer(1), FakeServer(2), "a:1", 3, 0)["different"] == 3  # type: ignore[arg-type]
