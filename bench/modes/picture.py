"""Draws the times to first token of the modes, a panel for each traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import StrMethodFormatter

from bench.parts.picture import QUIET, STYLE

_COLORS = ("#8a8f98", "#57606a", "#1769aa", "#a57fc4", "#d9480f", "#2f9e8f", "#b8860b")


def draw_modes(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a PNG with a bar for each mode and traffic: the median time to first token. Labels also name the memory."""
    names = list(dict.fromkeys(row["traffic"] for row in rows))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(names), figsize=(12.5, 4.2), dpi=150, sharey=True, squeeze=False)
        figure.subplots_adjust(left=0.17, right=0.97, top=0.84, bottom=0.13, wspace=0.12)
        figure.text(0.02, 0.94, "Median time to first token, and K/V in memory at the end", fontsize=14, weight="bold")
        for panel, name in zip(panels[0], names, strict=True):
            traffic_rows = [row for row in rows if row["traffic"] == name]
            bars = panel.barh(
                [row["mode"] for row in traffic_rows], [row["ttft_ms"] for row in traffic_rows], color=_COLORS
            )
            labels = [f"{row['ttft_ms']:,.0f} ms, {row['memory_mb']:,.0f} MB" for row in traffic_rows]
            panel.bar_label(bars, labels, padding=4, fontsize=8.5, color=QUIET)
            panel.set_title(name, fontsize=11)
            panel.set_xlim(0, 1.45 * max(row["ttft_ms"] for row in traffic_rows))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f} ms"))
            panel.grid(axis="x")
        panels[0][0].invert_yaxis()
        figure.savefig(path, format="png", facecolor="white")
        plt.close(figure)
