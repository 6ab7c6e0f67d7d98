import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.windows.__main__ import WindowedServer, main, measure, model_of
from radixkv.api.result import PrefillResult

pytestmark = pytest.mark.long

SMALL = ("--window", "40", "--layers", "6", "--block-size", "16", "--step-tokens", "32")


def test_a_long_prompt_needs_the_blocks_of_its_window_and_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--tokens", "200", "400", "--json", str(tmp_path / "windows.json")])
    result = json.loads((tmp_path / "windows.json").read_text())
    first, second = result["rows"]
    assert (first["one_pool_blocks"], second["one_pool_blocks"]) == (13, 25)
    assert first["bound_blocks"] == second["bound_blocks"] == 6
    for row in (first, second):
        long, next_turn, repeated, branch = row["prompts"]
        assert long["most_needed_blocks"] <= row["bound_blocks"]
        assert long["most_blocks_in_use"] <= row["windowed_pool_blocks"]
        assert next_turn["cached_tokens"] == next_turn["one_pool_cached_tokens"] == row["num_tokens"]
        assert repeated["one_pool_cached_tokens"] == row["num_tokens"] - 1
        assert branch["cached_tokens"] < branch["one_pool_cached_tokens"] == row["num_tokens"] // 2
        assert branch["miss_reason"] == "NO_WINDOW"
        assert row["bytes"] < row["one_pool_bytes"]
    assert result["command"].startswith("python -m bench.windows --window 40")
    assert "windowed layers need at most" in capsys.readouterr().out


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(6, 40, 400)
    original_prefill = WindowedServer.prefill

    def change_logits(server: WindowedServer, prompt: Sequence[int]) -> PrefillResult:
        result = original_prefill(server, prompt)
        assert result.logits is not None
        has_windowed_pool = bool(server.storage.part_pools)
        return replace(result, logits=result.logits + 1) if has_windowed_pool else result

    monkeypatch.setattr(WindowedServer, "prefill", change_logits)
    with pytest.raises(AssertionError, match="the long prompt: expected the same bits"):
        measure(model, 60, 16, 32)
