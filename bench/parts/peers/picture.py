"""Draws the comparison: the time of each engine in each row, as a multiple of the best peer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.parts.peers.comparison import Result, by_setting, is_ours
from bench.parts.picture import INK, QUIET, STYLE

_COLORS = {
    "radixkv": "#1769aa",
    "radixkv-fast": "#6fb1e0",
    "openvino": "#7048e8",
    "vllm": "#e8890c",
    "llama.cpp": "#2b8a3e",
    "transformers": "#8a8f98",
    "transformers-batching": "#495057",
}
_LIMIT_MARK: dict[str, Any] = {"marker": "|", "linestyle": "", "color": INK, "markersize": 13}
_ROW_INCHES = 0.42


def draw_comparison(path: Path, rows: Sequence[Result], machine: str) -> None:
    """Draw a panel for each setting and write it as SVG; replaced if it exists.

    Args:
        rows: the results of `compare`.
        machine: description of the machine, shown below the title.
    """
    panels = by_setting(rows)
    heights = [len(panel_rows) + 1.4 for panel_rows in panels.values()]
    inches = sum(heights) * _ROW_INCHES + 1.75
    with plt.rc_context({**STYLE, "svg.hashsalt": "peers"}):
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(11, inches), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
        )
        figure.subplots_adjust(left=0.34, right=0.97, top=1 - 1.5 / inches, bottom=0.55 / inches, hspace=0.3)
        title = "Time of each engine, as a multiple of the best peer's"
        figure.text(0.02, 1 - 0.35 / inches, title, fontsize=15, fontweight="bold", va="center")
        figure.text(0.02, 1 - 0.65 / inches, f"left is faster; {machine}", va="center", color=QUIET)
        for axis, (setting, panel_rows) in zip(axes[:, 0], panels.items(), strict=True):
            _draw_panel(axis, panel_rows, str(setting))
        engines = list(dict.fromkeys(engine for row in rows for engine in row["engines"]))
        handles = [Line2D([], [], marker="o", linestyle="", color=_color(each), label=each) for each in engines]
        handles.append(Line2D([], [], **_LIMIT_MARK, label="limit of the machine"))
        position = (0.01, 1 - 1.05 / inches)
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=position, ncols=8, frameon=False, fontsize=9)
        axes[-1, 0].set_xlabel("time / best peer's time")
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)


def _draw_panel(axis: Any, rows: Sequence[Result], title: str) -> None:
    axis.set_xscale("log")
    axis.axvline(1, color=INK, linewidth=1)
    for position, row in enumerate(rows):
        best_peer = row["engines"].get(row["best_peer"])
        if best_peer is None:
            continue
        for engine, each in row["engines"].items():
            size = 9 if is_ours(engine) else 7
            ratio = each["wall_s"] / best_peer["wall_s"]
            axis.plot(ratio, position, "o", color=_color(engine), markersize=size, markeredgecolor="white", zorder=3)
        if row["least_s"] is not None:
            axis.plot(row["least_s"] / best_peer["wall_s"], position, **_LIMIT_MARK)
    axis.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title(title, loc="left", fontsize=10.5)
    axis.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(visible=True, axis="x")


def _color(engine: str) -> str:
    return _COLORS.get(engine, QUIET)
