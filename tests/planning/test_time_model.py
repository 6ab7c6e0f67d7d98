"""Time models in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.planning.time_model import LoadTime, TimeModel

MODEL = TimeModel(1536, 1e-4, 1e-9, 0.002, {"host": LoadTime(5e9, 1e-4), "disk": LoadTime(1e9)})


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    MODEL.write(tmp_path / "times.json")
    assert TimeModel.read(tmp_path / "times.json") == MODEL


def test_a_prefill_takes_longer_after_more_tokens() -> None:
    positions = sum(range(100, 300))
    assert MODEL.prefill_s(100, 300) == pytest.approx(0.002 + 200 * 1e-4 + positions * 1e-9)
    assert MODEL.prefill_s(0, 100) + MODEL.prefill_s(100, 300) == pytest.approx(MODEL.prefill_s(0, 300) + 0.002)


def test_a_load_takes_the_time_of_its_tier() -> None:
    assert MODEL.load_s("host", 1000) == pytest.approx(1e-4 + 1000 * 1536 / 5e9)
    assert MODEL.load_s("redis", 1000) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_s": None}, "token_s: expected a number above 0, got None"),
        ({"token_s": 0}, "token_s: expected a number above 0, got 0"),
        ({"token_s": True}, "token_s: expected a number above 0, got True"),
        ({"position_s": -1}, "position_s: expected a number of at least 0, got -1"),
        ({"start_s": "1"}, "start_s: expected a number of at least 0, got '1'"),
        ({"token_bytes": float("inf")}, "token_bytes: expected a number above 0, got inf"),
        ({"token_bytes": 10**400}, "token_bytes: expected a number above 0, got 10000"),
        ({"speed": 1}, "speed: expected one of token_bytes, token_s, position_s, start_s"),
        ({"tiers": [1]}, r"tiers: expected an object, got \[1\]"),
        ({"tiers": {"host": 1}}, "tiers.host: expected an object"),
        ({"tiers": {"host": {}}}, "tiers.host.bytes_per_s: expected a number above 0, got None"),
        ({"tiers": {"host": {"gb_s": 1}}}, "tiers.host.gb_s: expected one of bytes_per_s, latency_s"),
    ],
)
def test_a_model_that_is_wrong_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "times.json"
    MODEL.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=f"^time model {path}: {message}"):
        TimeModel.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, None])
def test_a_file_without_a_model_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"^time model {path}: "):
        TimeModel.read(path)
