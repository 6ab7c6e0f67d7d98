"""Draws a replay: the distribution of times to first token, and the times in order of sending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from bench.parts.load_generator import OK, Pass
from bench.parts.report import Summary, describe_partial, describe_served

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

_WITH, _WITHOUT, _COLD = "#1769aa", "#8a8f98", "#d9480f"
INK, QUIET, _FAINT = "#1f2328", "#57606a", "#d8dce1"
_REUSE = LinearSegmentedColormap.from_list("reuse", (_COLD, "#e58a54", "#a57fc4", "#5d86d0", _WITH))
_LEGEND: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 2, "frameon": False}
STYLE: Any = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8a8f98",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
}


def draw_ttft(path: Path, report: Summary, with_cache: Pass, without_cache: Pass | None) -> None:
    """Draw the distribution of TTFT on the left, TTFT in order of sending on the right, and write it as PNG.

    Args:
        path: PNG file to write; replaced if it exists.
        report: has the numbers for the title and the captions.
        with_cache: the pass over all requests.
        without_cache: the pass over some of them; None if there was none.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(12.5, 5.6), dpi=150, gridspec_kw={"width_ratios": (1, 1.35), "wspace": 0.2}
        )
        figure.subplots_adjust(left=0.06, right=0.985, top=0.72 if report["partial"] else 0.76, bottom=0.11)
        _draw_heading(figure, report)
        _draw_distribution(left, with_cache, without_cache, is_compared=report["speedup"] is not None)
        _draw_sequence(right, with_cache, without_cache)
        figure.savefig(path, format="png", facecolor="white")
        plt.close(figure)


def _draw_heading(figure: Figure, report: Summary) -> None:
    title = f"{report['workload']}: time to first token"
    ratio = report["speedup"]["ttft_p50"] if report["speedup"] else None
    if ratio is not None:
        # Over the requests that were answered in both passes, like the ratio.
        with_ms, without_ms = (
            report["baseline_sample"]["with_cache_ttft_ms"]["p50"],
            report["without_cache"]["ttft_ms"]["p50"],
        )
        title += f", median {_format_ms(without_ms)} → {_format_ms(with_ms)}, {_describe_ratio(ratio)}"
    elif report["without_cache"]:
        title += "; too few answers to compare"
    hit_rate = "" if report["token_hit_rate"] is None else f"; {report['token_hit_rate']:.1%} of them reused"
    served = f"{describe_served(report)}; {report['traffic_text']}"
    figure.text(0.06, 0.945, title, fontsize=16, fontweight="bold", va="center")
    figure.text(0.06, 0.89, report["workload_text"] + hit_rate, va="center", color=QUIET)
    figure.text(0.06, 0.85, served, va="center", color=QUIET)
    if partial := describe_partial(report):
        figure.text(0.06, 0.81, partial, va="center", color=_COLD, fontweight="bold")


def _draw_distribution(axes: Axes, with_cache: Pass, without_cache: Pass | None, *, is_compared: bool) -> None:
    medians_ms = []
    for replayed, color, name in ((with_cache, _WITH, "with cache"), (without_cache, _WITHOUT, "without cache")):
        label = name if replayed is None else _label_of(name, replayed, with_cache.num_planned)
        ordered_ms = np.sort(_ttft_ms(replayed)) if replayed is not None else np.empty(0)
        if not len(ordered_ms):
            continue
        shares = np.linspace(0, 100, len(ordered_ms) + 1)
        median_ms = float(np.median(ordered_ms))
        medians_ms.append(median_ms)
        # The curve begins at 0 % at the first answer, so its first time is there twice.
        starts_ms = np.concatenate((ordered_ms[:1], ordered_ms))
        axes.step(starts_ms, shares, where="post", color=color, linewidth=2.4, label=label)
        axes.plot(median_ms, 50, "o", color=color, markersize=8, markeredgecolor="white", zorder=5)
    _use_log_scale(axes.xaxis, axes.set_xscale, max_narrow_ratio=100)
    axes.set(xlabel="time to first token", ylabel="requests answered within this time, %", ylim=(0, 101))
    axes.grid(visible=True)
    if is_compared and len(medians_ms) == 2:
        with_ms, without_ms = medians_ms
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 5, "shrinkB": 5}
        axes.annotate("", (with_ms, 50), (without_ms, 50), arrowprops=arrow)
        low_ms, high_ms = axes.get_xlim()
        if abs(np.log(without_ms / with_ms)) > 0.35 * np.log(high_ms / low_ms):  # otherwise the text hides the curves
            middle_ms = (with_ms * without_ms) ** 0.5
            axes.text(
                middle_ms, 52.5, _describe_ratio(without_ms / with_ms), ha="center", fontweight="bold", bbox=_text_box()
            )
    if medians_ms:
        axes.legend(**_LEGEND)


def _label_of(name: str, replayed: Pass, num_all: int) -> str:
    num_replayed = len(replayed.outcomes)
    return name if num_replayed == num_all else f"{name}, {num_replayed:,} of {num_all:,}"


def _draw_sequence(axes: Axes, with_cache: Pass, without_cache: Pass | None) -> None:
    if without_cache is not None and without_cache.outcomes:
        positions = [outcome.index + 1 for outcome in without_cache.outcomes if outcome.status == OK]
        axes.scatter(positions, _ttft_ms(without_cache), s=10, color=_WITHOUT, alpha=0.55, linewidths=0)
        axes.scatter([], [], s=24, color=_WITHOUT, linewidths=0, label="without cache")
        axes.legend(**_LEGEND)
    answered = [outcome for outcome in with_cache.outcomes if outcome.status == OK]
    positions = [outcome.index + 1 for outcome in answered]
    ttft_ms = _ttft_ms(with_cache)
    reused_shares = np.array([outcome.cached_tokens / outcome.prompt_tokens for outcome in answered])
    # Requests that reuse almost nothing are few, so their points are larger.
    sizes = np.where(reused_shares < 0.01, 26, 10)
    points = axes.scatter(positions, ttft_ms, s=sizes, c=reused_shares, cmap=_REUSE, vmin=0, vmax=1, linewidths=0)
    _draw_reuse_scale(axes, points)
    _use_log_scale(axes.yaxis, axes.set_yscale, max_narrow_ratio=300)
    axes.set(xlabel="request, in order of sending", ylabel="time to first token")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlim(1 - 0.02 * with_cache.num_planned, 1 + 1.02 * with_cache.num_planned)
    axes.grid(visible=True, axis="y")
    if answered and answered[0].index == 0 and answered[0].cached_tokens == 0:
        low_ms, high_ms = axes.get_ylim()
        is_in_upper_half = ttft_ms[0] ** 2 > low_ms * high_ms
        axes.annotate(
            f"first request: cold, {_format_ms(ttft_ms[0])}",
            (1, ttft_ms[0]),
            xytext=(20, -42 if is_in_upper_half else 42),
            textcoords="offset points",
            color=_COLD,
            fontweight="bold",
            bbox=_text_box(),
            arrowprops={"arrowstyle": "-", "color": _COLD, "shrinkB": 4, "relpos": (0, 0.5)},
        )


def _draw_reuse_scale(axes: Axes, points: PathCollection) -> None:
    inset = axes.inset_axes((0.7, 1.06, 0.22, 0.025))
    scale = axes.figure.colorbar(points, cax=inset, orientation="horizontal", ticks=[])
    scale.outline.set_visible(False)
    inset.text(-0.03, 0.5, "with cache: 0% reused", transform=inset.transAxes, ha="right", va="center")
    inset.text(1.03, 0.5, "100%", transform=inset.transAxes, ha="left", va="center")


def _ttft_ms(replayed: Pass) -> npt.NDArray[np.float64]:
    return np.array([outcome.ttft_s * 1e3 for outcome in replayed.outcomes if outcome.status == OK])


def _use_log_scale(axis: Axis, set_scale: Callable[[str], object], max_narrow_ratio: float) -> None:
    if not np.isfinite(axis.get_data_interval()).all():
        return  # nothing was answered
    set_scale("log")
    low_ms, high_ms = axis.get_view_interval()
    # On an axis of a few decades, ticks at 1, 10, 100 are too few to read a value; ticks at 1, 2, 5 over many decades
    # overlap.
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high_ms < max_narrow_ratio * low_ms else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _format_ms(value)))
    axis.set_minor_formatter(NullFormatter())


def _format_ms(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms"


def _describe_ratio(ratio: float) -> str:
    if 0.95 < ratio < 1.05:
        return "about the same"
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def _text_box() -> dict[str, object]:
    return {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
