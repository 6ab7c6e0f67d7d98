"""The plot is a reproducible SVG, with a panel per setting and a label per engine."""

from __future__ import annotations

from pathlib import Path

from bench.parts.peers.comparison import compare
from bench.parts.peers.engines import PeerSetting
from bench.parts.peers.picture import draw_comparison
from bench.parts.peers.rows import PeerSample, build_rows


def test_the_plot_shows_all_settings_and_engines(tmp_path: Path) -> None:
    rows = []
    for setting in (PeerSetting("llama", "float32", 1), PeerSetting("tiny", "float32", 2)):
        for name, row in build_rows().items():
            if row.model == setting.model:
                samples = {
                    "radixkv": [PeerSample(1.0, 1.0, (1,), None)],
                    "vllm": [PeerSample(2.0, 2.0, (1,), None)],
                }
                rows.append(compare(name, row, setting, samples))
    # A row without peers.
    rows.append(compare("warm", build_rows()["warm"], setting, {"radixkv": [PeerSample(1.0, 1.0, (1,), None)]}))
    for name in ("a.svg", "b.svg"):
        draw_comparison(tmp_path / name, rows, "a machine")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    for shown in ("llama, float32, 1 thread", "tiny, float32, 2 threads", "vllm", "a machine"):
        assert shown in text
