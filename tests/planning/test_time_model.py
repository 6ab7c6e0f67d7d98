"""Time models: their files, the times that they predict, and fits to measured times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.planning.time_model import LoadTime, MeasuredPrefill, TimeModel

MODEL = TimeModel(
    token_bytes=1536,
    token_s=1e-4,
    position_s=1e-9,
    start_s=0.002,
    tiers={"host": LoadTime(bytes_per_s=5e9, latency_s=1e-4), "disk": LoadTime(bytes_per_s=1e9)},
)


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
def test_an_invalid_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
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


def prefills_of(model: TimeModel, num_prefills: int) -> Iterator[MeasuredPrefill]:
    """Yield prefills of random lengths, some after loads from the host tier, with the times that a model predicts."""
    random = Random(1)
    for _ in range(num_prefills):
        start, length = random.randrange(0, 4096, 64), random.randint(1, 1000)
        loaded = {"host": random.randrange(0, start + 1, 64), "disk": 0}
        ttft_s = model.prefill_s(start, start + length)
        ttft_s += model.load_s("host", loaded["host"]) if loaded["host"] else 0.0
        yield MeasuredPrefill(start, start + length, loaded, ttft_s)


def test_a_fit_finds_the_model_of_exact_times() -> None:
    host = LoadTime(bytes_per_s=1e8, latency_s=0.002)
    model = TimeModel(token_bytes=1000, token_s=1e-4, position_s=2e-8, start_s=0.01, tiers={"host": host})
    fitted = TimeModel.fit(list(prefills_of(model, 300)), token_bytes=1000)
    assert (fitted.token_s, fitted.position_s, fitted.start_s) == pytest.approx((1e-4, 2e-8, 0.01), rel=1e-6)
    assert list(fitted.tiers) == ["host"]
    assert (fitted.tiers["host"].bytes_per_s, fitted.tiers["host"].latency_s) == pytest.approx((1e8, 0.002), rel=1e-6)


def test_requests_that_waited_for_others_hardly_change_a_fit() -> None:
    model = TimeModel(token_bytes=1, token_s=1e-4, start_s=0.01, tiers={"host": LoadTime(1e6)})
    measured = list(prefills_of(model, 300))
    for index in range(0, 300, 5):  # every fifth request waited for ten seconds
        measured[index] = dataclasses.replace(measured[index], ttft_s=measured[index].ttft_s + 10)
    fitted = TimeModel.fit(measured)
    assert fitted.prefill_s(1000, 1500) == pytest.approx(model.prefill_s(1000, 1500), rel=0.01)


@pytest.mark.parametrize("count", [1, 2, 25_000])
def test_equal_times_are_fitted_whatever_their_number(count: int) -> None:
    fitted = TimeModel.fit([MeasuredPrefill(64, 164, {}, 0.25)] * count)
    assert fitted.prefill_s(64, 164) == pytest.approx(0.25)
    assert fitted.tiers == {}


def test_no_fitted_number_is_negative(tmp_path: Path) -> None:
    # Longer prefills that take less time would make `token_s` negative.
    measured = [MeasuredPrefill(0, length, {"host": 64 * length}, 1 / length) for length in range(1, 50)]
    fitted = TimeModel.fit(measured)
    assert min(fitted.token_s, fitted.position_s, fitted.start_s, fitted.tiers["host"].latency_s) >= 0
    fitted.write(tmp_path / "times.json")
    assert TimeModel.read(tmp_path / "times.json") == fitted
    assert fitted.tiers["host"].bytes_per_s > 0


def test_prefills_that_took_no_time_are_fitted() -> None:
    assert TimeModel.fit([MeasuredPrefill(0, 10, {}, 0.0)] * 3).prefill_s(0, 10) == pytest.approx(0, abs=1e-6)
