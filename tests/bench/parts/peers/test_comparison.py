"""Medians, ratios and differing first tokens."""

from __future__ import annotations

import pytest

from bench.parts.peers.comparison import compare, count_different, is_ours
from bench.parts.peers.engines import PeerSetting
from bench.parts.peers.rows import PeerSample, build_rows

ROW = build_rows()["warm"]
SETTING = PeerSetting("llama", "float32", 1)


def samples(*wall_times_s: float, cpu_per_wall: float = 1.0, token: int = 5) -> list[PeerSample]:
    return [PeerSample(wall_s, wall_s * cpu_per_wall, (token, 6), 10) for wall_s in wall_times_s]


def test_the_median_of_radixkv_is_divided_by_that_of_the_best_peer() -> None:
    samples_by_engine = {
        "radixkv": samples(2.0, 9.0, 1.0),
        "radixkv-fast": samples(1.0),
        "openvino": samples(4.0, 4.0, 5.0, cpu_per_wall=0.1),
        "vllm": samples(8.0, 3.0, 2.0, cpu_per_wall=3.0),
    }
    row = compare("warm", ROW, SETTING, samples_by_engine)
    assert (row["best_peer"], row["ratio"]) == ("vllm", pytest.approx(2 / 3))
    assert row["ratios"] == {"radixkv": pytest.approx(2 / 3), "radixkv-fast": pytest.approx(1 / 3)}
    assert (row["cpu_best_peer"], row["cpu_ratio"]) == ("openvino", pytest.approx(2 / 0.4))
    assert row["engines"]["vllm"]["wall_s_each"] == [8.0, 3.0, 2.0]
    assert (row["dtype"], row["threads"], row["shared_tokens"]) == ("float32", 1, 2048)


def test_without_a_peer_or_without_radixkv_there_is_no_ratio() -> None:
    assert compare("warm", ROW, SETTING, {"radixkv": samples(1.0), "vllm": []})["ratio"] is None
    assert compare("warm", ROW, SETTING, {"radixkv": [], "vllm": samples(1.0)})["ratio"] is None
    assert compare("warm", ROW, SETTING, {})["engines"] == {}


def test_differing_first_tokens_are_counted_by_engine() -> None:
    samples_by_engine = {"radixkv": samples(1.0, 1.0), "vllm": samples(1.0, 1.0), "openvino": samples(1.0, token=7)}
    engines = compare("warm", ROW, SETTING, samples_by_engine)["engines"]
    assert {name: each["different_first_tokens"] for name, each in engines.items()} == {
        "radixkv": 0,
        "vllm": 0,
        "openvino": 1,
    }
    assert engines["openvino"]["first_tokens"] == 2


def test_if_no_token_has_a_majority_engines_are_compared_with_the_first() -> None:
    assert count_different([{"radixkv": [1], "vllm": [2]}]) == {"radixkv": (1, 0), "vllm": (1, 1)}


def test_both_modes_are_recognized_as_radixkv() -> None:
    assert [is_ours(name) for name in ("radixkv", "radixkv-fast", "transformers-batching")] == [True, True, False]
