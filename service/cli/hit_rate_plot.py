"""A plot of simulations: hit rate against capacity, with one line per policy and one for the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from radixkv.planning.simulate import OPTIMAL, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLACK, _GRAY, _LIGHT_GRAY = "#1f2328", "#57606a", "#d8dce1"
_COLORS = {"adaptive": "#d9480f", "lru": "#1769aa", "slru": "#2b8a3e", "lfu": "#8f5bb3", "priority": "#a8761b"}
_FURTHER_COLORS = ("#0b7285", "#c2255c", "#5f3dc4")
_STYLE: Any = {
    "font.size": 10.5,
    "text.color": _BLACK,
    "axes.labelcolor": _BLACK,
    "axes.edgecolor": "#8a8f98",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
    "grid.color": _LIGHT_GRAY,
    "grid.linewidth": 0.8,
}
_LABEL_GAP = 0.042  # minimum distance between the names at the right, as a fraction of the height of the axes


def draw_hit_rates(path: Path, simulations: Sequence[Simulation], trace: str) -> None:
    """Draw token hit rate against capacity and write it as PNG; replaces an existing file.

    Args:
        path: file to write.
        simulations: at least one, of one trace and one block size.
        trace: name of the trace, for the heading.
    """
    curves: dict[str, list[Simulation]] = {}
    for simulation in sorted(simulations, key=lambda each: each.capacity_tokens):
        curves.setdefault(simulation.policy, []).append(simulation)
    first = simulations[0]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(8.6, 5.4), dpi=150)
        figure.subplots_adjust(left=0.085, right=0.865, top=0.84, bottom=0.115)
        figure.text(
            0.085, 0.945, "Prompt tokens reused, by cache capacity", fontsize=15, fontweight="bold", va="center"
        )
        summary = f"{trace}: {first.requests:,} requests, {first.prompt_tokens:,} tokens; blocks of {first.block_size}"
        figure.text(0.085, 0.89, summary, va="center", color=_GRAY)
        _draw_curves(axes, curves)
        figure.savefig(path, format="png", facecolor="white")
        plt.close(figure)


def _draw_curves(axes: Axes, curves: dict[str, list[Simulation]]) -> None:
    further_colors = iter(_FURTHER_COLORS * len(curves))
    ends: list[tuple[float, str, str]] = []  # of each curve: its last hit rate in percent, the policy and the color
    for policy, curve in curves.items():
        capacities = [each.capacity_tokens for each in curve]
        shares = [100 * each.token_hit_rate for each in curve]
        if policy == OPTIMAL:
            color = _GRAY
            line: Any = {"linestyle": (0, (5, 2)), "linewidth": 1.8, "zorder": 2}
            axes.fill_between(capacities, shares, 100, color="#f3f4f6", zorder=0, linewidth=0)
        else:
            color = _COLORS[policy] if policy in _COLORS else next(further_colors)
            line = {"linewidth": 2.2, "zorder": 3}
        axes.plot(capacities, shares, color=color, marker="o", markersize=5.5, markeredgecolor="white", **line)
        ends.append((shares[-1], policy, color))

    simulations = [each for curve in curves.values() for each in curve]
    capacities = sorted({each.capacity_tokens for each in simulations})
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_labeled_capacities(capacities)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    if capacities[0] < capacities[-1]:
        margin = (capacities[-1] / capacities[0]) ** 0.03
        axes.set_xlim(capacities[0] / margin, capacities[-1] * margin)
    top = max(1.0, *(100 * each.token_hit_rate for each in simulations)) * 1.08
    axes.set(ylim=(0, min(top, 102)), xlabel="capacity, tokens (log scale)", ylabel="prompt tokens reused")
    axes.grid(visible=True)
    _label_curves(axes, ends)


def _label_curves(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write the name of each policy where its line ends, with at least `_LABEL_GAP` between two names."""
    low, high = axes.get_ylim()
    # From the highest label down, move labels down; then, from the lowest one up, move those up that are too low.
    labels = sorted(((share - low) / (high - low), policy, color) for share, policy, color in ends)
    heights = [height for height, _, _ in labels]
    for index in range(len(heights) - 2, -1, -1):
        heights[index] = min(heights[index], heights[index + 1] - _LABEL_GAP)
    bottom = 0.0
    for height, (_, policy, color) in zip(heights, labels, strict=True):
        bottom = max(height, bottom)
        axes.text(1.015, bottom, policy, transform=axes.transAxes, color=color, va="center")
        bottom += _LABEL_GAP


def _labeled_capacities(capacities: Sequence[int]) -> list[int]:
    """Return the capacities that get a label: each is at least a fifth larger than the previous one."""
    labeled: list[int] = []
    for capacity in capacities:
        if not labeled or capacity >= 1.2 * labeled[-1]:
            labeled.append(capacity)
    return labeled


def _tokens(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"
