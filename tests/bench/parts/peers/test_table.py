"""The table has a block for each setting, and hides neither who is missing nor who differs."""

from __future__ import annotations

from bench.parts.peers.comparison import compare
from bench.parts.peers.engines import PeerSetting
from bench.parts.peers.rows import PeerSample, build_rows
from bench.parts.peers.table import format_table


def row(name: str, setting: PeerSetting, least_s: float | None = None, **seconds: float) -> dict:
    tokens = {"radixkv": 1, "vllm": 1, "openvino": 2}
    given = {engine: [PeerSample(each, 2 * each, (tokens[engine],), None)] for engine, each in seconds.items()}
    return compare(name, build_rows()[name], setting, given, least_s)


def test_it_shows_times_ratios_and_differences() -> None:
    one, demo = PeerSetting("llama", "float32", 1), PeerSetting("tiny", "float32", 2)
    rows = [
        row("cold", one, least_s=2.0, radixkv=6.0, openvino=3.0, vllm=4.0),
        row("decode", one, radixkv=0.05, vllm=0.1),
        row("demo-16", demo, least_s=0.001, radixkv=0.004, vllm=0.002),
    ]
    text = format_table(rows, {"llama.cpp": "no compiler"}, ["cold: openvino: ended with:\nTraceback\nno memory"])
    lines = text.splitlines()
    assert lines[0] == "llama, float32, 1 thread: wall (CPU) time, medians"
    assert lines[4].split("  ")[0] == "first token, nothing cached"
    assert "6.00 s (12.00)" in lines[4]
    assert lines[4].endswith("2.00 openvino  2.00 openvino  2.00 s          3.00")
    assert "50.0 ms (100.0)" in lines[5]
    assert "0.50 vllm" in lines[5]
    assert "first tokens that are not what most engines gave: openvino 1 of 1" in lines
    assert "tiny, float32, 2 threads: wall (CPU) time, medians" in lines
    assert "250/s (8.0 ms)  500/s (4.0 ms)" in text
    assert "1,000/s          4.00" in text
    assert "first tokens that are not what most engines gave: none of 2" in lines
    assert lines[-2:] == ["skipped llama.cpp: no compiler", "FAILED cold: openvino: ended with: no memory"]


def test_a_row_that_an_engine_did_not_finish_has_a_gap() -> None:
    one = PeerSetting("llama", "float32", 1)
    text = format_table([row("cold", one, radixkv=6.0, vllm=4.0), row("warm", one, radixkv=0.5)], {}, [])
    assert text.splitlines()[5].split()[-5:] == ["-", "-", "-", "-", "-"]
