"""Medians, ratios and differing first tokens."""

from __future__ import annotations

import pytest

from bench.parts.peers.comparison import compare, count_different, is_ours
from bench.parts.peers.engines import PeerSetting
from bench.parts.peers.rows import PeerSample, build_rows

ROW = build_rows()["warm"]
SETTING = PeerSetting("llama", "float32", 1)


def samples(*seconds: float, cpu: float = 1.0, token: int = 5) -> list[PeerSample]:
    return [PeerSample(each, each * cpu, (token, 6), 10) for each in seconds]


def test_ours_is_divided_by_the_best_peer() -> None:
    given = {
        "radixkv": samples(2.0, 9.0, 1.0),
        "radixkv-fast": samples(1.0),
        "openvino": samples(4.0, 4.0, 5.0, cpu=0.1),
        "vllm": samples(8.0, 3.0, 2.0, cpu=3.0),
    }
    row = compare("warm", ROW, SETTING, given)
    assert (row["best_peer"], row["ratio"]) == ("vllm", pytest.approx(2 / 3))
    assert row["ratios"] == {"radixkv": pytest.approx(2 / 3), "radixkv-fast": pytest.approx(1 / 3)}
    assert (row["cpu_best_peer"], row["cpu_ratio"]) == ("openvino", pytest.approx(2 / 0.4))
    assert row["engines"]["vllm"]["wall_s_each"] == [8.0, 3.0, 2.0]
    assert (row["dtype"], row["threads"], row["shared_tokens"]) == ("float32", 1, 2048)


def test_without_a_peer_or_without_us_there_is_no_ratio() -> None:
    assert compare("warm", ROW, SETTING, {"radixkv": samples(1.0), "vllm": []})["ratio"] is None
    assert compare("warm", ROW, SETTING, {"radixkv": [], "vllm": samples(1.0)})["ratio"] is None
    assert compare("warm", ROW, SETTING, {})["engines"] == {}


def test_differing_first_tokens_are_counted_by_engine() -> None:
    given = {"radixkv": samples(1.0, 1.0), "vllm": samples(1.0, 1.0), "openvino": samples(1.0, token=7)}
    engines = compare("warm", ROW, SETTING, given)["engines"]
    assert {name: each["different_first_tokens"] for name, each in engines.items()} == {
        "radixkv": 0,
        "vllm": 0,
        "openvino": 1,
    }
    assert engines["openvino"]["first_tokens"] == 2


def test_where_no_token_leads_the_first_engine_is_followed() -> None:
    assert count_different([{"radixkv": [1], "vllm": [2]}]) == {"radixkv": (1, 0), "vllm": (1, 1)}


def test_both_modes_are_ours() -> None:
    assert [is_ours(name) for name in ("radixkv", "radixkv-fast", "transformers-batching")] == [True, True, False]
