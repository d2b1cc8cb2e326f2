"""SVG plots of the comparisons: the errors of one stage, the map of all stages and taps, and the errors along depth.

Equal input gives equal bytes: there are no dates, and ids depend only on the content. Text stays text.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from layerproof.files import replacing
from layerproof.model.stages import layer_of
from layerproof.taps import OUT, merged

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "layerproof",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
}
# Okabe and Ito's colours, which people with any form of colour blindness can distinguish; lines also differ in style.
PORT, GOLDEN = "#d55e00", "#0072b2"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dv<>P"
GREY = "#d0d0d0"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# What is within the limit stays pale. What is further off gets darker, so that it also shows in print.
SCALE = LinearSegmentedColormap.from_list(
    "times too far off",
    [(0, "#b9d6ea"), (0.5, "#f6f6f3"), (0.6, "#fde0b8"), (0.75, "#f08a3c"), (0.9, "#b83a0e"), (1, "#7a1d05")],
)

MAX_PROMPTS = 8
MAX_POSITIONS = 256
LOW, HIGH = 0.1, 100.0
"""The ends of the map's colour scale. Values beyond them get the colour of the end."""
DARK = 8.0
"""Above this value, a cell of the map is so dark that its text is white."""
MAX_LABELLED_STAGES = 16
"""A map of more stages has no room for a number in each cell and for the name of each stage."""
MIN_COLUMNS = 6
STAGE_MARGINS = {"left": 0.055, "right": 0.99, "bottom": 0.16, "top": 0.9, "wspace": 0.24}
"""Shares of the figure. A layout that computes them would take as long again as the drawing, for each stage."""


def plot_stage(comparison: Mapping[str, Any], output: Path) -> None:
    """Plots the output of one stage: histogram and quantiles of the errors of port and golden, and R by token.

    `comparison` is the content of results/compare/STAGE.json. If a stage has no errors, because its output was not
    compared or is exact, the plot is one line that says so.
    """
    out = comparison["taps"].get(OUT, {})
    nothing = _nothing_to_draw(comparison, out)
    with _figure(output, (11.0, 0.4 if nothing else 3.1), layout=None) as figure:
        if nothing:
            figure.text(0.01, 0.5, f"{comparison['stage']}: {nothing}", va="center")
            return
        histogram, quantiles, tokens = figure.subplots(1, 3, width_ratios=(1, 0.8, 1.2), gridspec_kw=STAGE_MARGINS)
        _draw_histogram(histogram, out["histogram"])
        _draw_quantiles(quantiles, out["qq"])
        _draw_tokens(tokens, out["token_R"])


def _nothing_to_draw(comparison: Mapping[str, Any], out: Mapping[str, Any]) -> str | None:
    if not out.get("count"):
        return f"no errors to draw. {textwrap.shorten(str(out.get('reason') or comparison['reason']), 140)}"
    if out["abs"]["max"] == 0 and not sum(out["histogram"]["port"]):
        return "no errors to draw: port, golden and truth are equal."
    return None


def _draw_histogram(axes: Axes, histogram: Mapping[str, Any]) -> None:
    axes.set_title("Size of the errors of out")
    counts = {side: np.asarray(histogram[side]) for side in ("port", "golden")}
    edges = np.asarray(histogram["log10_edges"])
    used = np.flatnonzero(counts["port"] + counts["golden"])
    span = slice(max(used[0] - 1, 0), used[-1] + 2)
    for side, style in (
        ("golden", {"facecolor": "#9ecae1", "edgecolor": GOLDEN, "fill": True}),
        ("port", {"edgecolor": PORT, "linewidth": 1.6}),
    ):
        exact = histogram["exact"][side]
        total = int(counts[side].sum()) + exact
        shares = counts[side][span] / total
        label = f"{side} − truth ({exact:,} of {total:,} exact)"
        axes.stairs(shares, 10.0 ** edges[span.start : span.start + len(shares) + 1], label=label, **style)
    axes.set_xscale("log")
    _label_powers(axes.xaxis)
    axes.margins(y=0.35)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("|error|")
    axes.set_ylabel("share of the elements")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_quantiles(axes: Axes, quantiles: Mapping[str, Any]) -> None:
    axes.set_title("Quantiles: on the line, port = golden")
    pairs = [(p, g) for p, g in zip(quantiles["port"], quantiles["golden"], strict=True) if p and g]
    if pairs:
        port, golden = map(np.asarray, zip(*pairs, strict=True))
        ends = np.asarray([min(port.min(), golden.min()) / 2, max(port.max(), golden.max()) * 2])
        axes.plot(ends, ends, color="#555555", linewidth=0.8)
        axes.plot(golden, port, "o", color=PORT, markersize=4, markerfacecolor="none")
        axes.set(xscale="log", yscale="log")
        _label_powers(axes.xaxis)
        _label_powers(axes.yaxis)
        axes.annotate(
            "largest", (golden[-1], port[-1]), (-5, 0), textcoords="offset points", ha="right", va="center", fontsize=8
        )
    else:
        axes.text(
            0.5, 0.5, "no quantile is above zero on both sides", ha="center", transform=axes.transAxes, fontsize=8
        )
    axes.set_xlabel("|golden − truth|")
    axes.set_ylabel("|port − truth|")


def _draw_tokens(axes: Axes, token_R: Sequence[Sequence[float | None]]) -> None:
    prompts = np.asarray(token_R, dtype=float)  # [batch, seq], NaN at padding
    highest = np.nanmax(prompts, axis=1, initial=-1)
    shown = [int(row) for row in np.argsort(-highest, kind="stable")[:MAX_PROMPTS] if highest[row] >= 0]
    step = math.ceil(prompts.shape[1] / MAX_POSITIONS)
    worst_of = f", worst of each {step} positions" if step > 1 else ""
    which = f", {len(shown)} worst of {len(prompts)} prompts" if len(shown) < len(prompts) else ""
    axes.set_title(f"R by token{which}{worst_of}")
    for number, row in enumerate(sorted(shown)):
        positions, values = _worst_by(step, prompts[row])
        axes.plot(
            positions,
            values,
            color=LINES[number],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1,
            marker=MARKERS[number] if len(positions) <= 64 else None,
            markersize=3.5,
            label=f"prompt {row}",
        )
    axes.axhline(1, color="#555555", linewidth=0.8)
    if highest.max() > 0:
        _log_ratio(axes, prompts[prompts > 0])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position")
    axes.set_ylabel("R")
    axes.legend(
        frameon=False, fontsize=7, ncols=4, loc="upper left", borderaxespad=0, handlelength=1.2, columnspacing=0.8
    )


def _label_powers(axis: Axis) -> None:
    """Labels powers of ten in plain text.

    matplotlib's own labels are formulas, and parsing them takes longer than the drawing.
    """
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))


def _power(value: float) -> str:
    return "10" + f"{math.log10(value):.0f}".translate(SUPERSCRIPT)


def _log_ratio(axes: Axes, values: np.ndarray) -> None:
    """A log scale for positive ratios around 1, at least two octaves, with plain numbers and room for a legend."""
    low, high = min(values.min() / 1.2, 0.5), max(values.max() * 1.2, 2.0)
    axes.set_yscale("log")
    axes.set_ylim(low, high * (high / low) ** 0.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _worst_by(step: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and largest values of every `step` neighbours of values [seq], without those that are all NaN."""
    padded = np.pad(values, (0, -len(values) % step), constant_values=np.nan).reshape(-1, step)
    keep = ~np.isnan(padded).all(axis=1)
    return (np.flatnonzero(keep) * step), np.nanmax(padded[keep], axis=1, initial=-np.inf)


def plot_map(comparisons: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Plots how many times too far off every tap (down) of every stage (across) is; a sign marks what failed, could not run
    or is missing.

    `comparisons` are the contents of results/compare, in the order of the stages.
    """
    taps = merged([*(list(comparison["taps"]) for comparison in comparisons), [OUT]])
    annotated = len(comparisons) <= MAX_LABELLED_STAGES
    with _figure(output, (11.0, 1.5 + 0.21 * len(taps))) as figure:
        axes = figure.add_subplot()
        norm = TwoSlopeNorm(0.0, math.log10(LOW), math.log10(HIGH))
        for x, comparison in enumerate(comparisons):
            for y, name in enumerate(taps):
                # A stage that ended before its taps were known has none: all of them get the status of the stage.
                tap = comparison["taps"].get(name) if comparison["taps"] else {"status": comparison["status"]}
                if tap:
                    _draw_cell(axes, x, y, tap, lambda excess: SCALE(norm(math.log10(excess))), annotated)
        axes.set_xlim(-0.5, max(len(comparisons), MIN_COLUMNS) - 0.5)
        axes.set_ylim(len(taps) - 0.5, -0.5)
        axes.set_yticks(range(len(taps)), taps)
        _label_stages(axes, [comparison["stage"] for comparison in comparisons])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        bar = figure.colorbar(ScalarMappable(norm, SCALE), ax=axes, pad=0.01, aspect=30, extend="both")
        ticks = (0.1, 0.3, 1, 3, 10, 30, 100)
        bar.set_ticks([math.log10(excess) for excess in ticks], labels=[f"{excess:g}" for excess in ticks])
        bar.ax.minorticks_off()
        bar.set_label("times too far off (1: the limit)")
        figure.legend(
            handles=[
                Patch(facecolor=SCALE(norm(0)), edgecolor=GREY, label="pass"),
                Patch(facecolor=SCALE(norm(1)), edgecolor="black", linewidth=1.4, label="× fail"),
                Patch(facecolor="white", edgecolor="#777777", hatch="////", label="E error"),
                Patch(facecolor=GREY, edgecolor="#777777", label="M missing"),
                Patch(facecolor="white", edgecolor=GREY, label="• pass, compared as integers"),
            ],
            loc="outside lower left",
            ncols=5,
            frameon=False,
            fontsize=8,
        )


def _draw_cell(axes: Axes, x: int, y: int, tap: Mapping[str, Any], colour: Any, annotated: bool) -> None:
    status, excess = tap["status"], tap.get("excess")
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "white", "linewidth": 0.5}
    sign = ""
    if status == "error":
        style, sign = {"facecolor": "white", "edgecolor": "#777777", "hatch": "////", "linewidth": 0.5}, "E"
    elif status == "missing":
        style, sign = {"facecolor": GREY, "edgecolor": "white", "linewidth": 0.5}, "M"
    elif excess is not None:
        style["facecolor"] = colour(min(max(excess, LOW), HIGH))
        sign = _brief(excess) if annotated else ""
    else:
        style |= {"edgecolor": GREY}
        sign = "•"
    if status == "fail":
        inset = 0.06
        style |= {"edgecolor": "black", "linewidth": 1.2}
        sign = f"× {sign}" if annotated and excess is not None else "×"
        axes.add_patch(Rectangle((x - 0.5 + inset, y - 0.5 + inset), 1 - 2 * inset, 1 - 2 * inset, zorder=2, **style))
    else:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **style))
    if sign:
        dark = excess is not None and excess > DARK
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if status == "error" else None
        axes.text(
            x,
            y,
            sign,
            ha="center",
            va="center",
            fontsize=7,
            color="white" if dark else "black",
            weight="bold" if status != "pass" else "normal",
            bbox=box,
            zorder=3,
        )


def plot_depth(comparisons: Sequence[Mapping[str, Any]], chains: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Plots the relative L2 error along depth, of each stage alone and of the chains, and below it each stage's gain.

    `comparisons` and `chains` are the contents of results/compare and results/compare/chain.
    """
    stages = [comparison["stage"] for comparison in comparisons]
    series = {"local, each stage alone": [c["taps"].get(OUT, {}).get("rel_l2") for c in comparisons]}
    gains: dict[str, list[float | None]] = {}
    for chain in chains:
        entries = [chain["stages"].get(stage, {}) for stage in stages]
        series[f"propagated, chain {chain['chain']}"] = [entry.get("propagated_error") for entry in entries]
        gains[f"chain {chain['chain']}"] = [entry.get("gain") for entry in entries]
    with _figure(output, (11.0, 4.6 if gains else 3.0)) as figure:
        axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1)) if gains else [figure.add_subplot()]
        axes[0].set_title("Relative L2 error of out, port to golden")
        _draw_series(axes[0], series, first=0)
        stopped = [x for x, comparison in enumerate(comparisons) if comparison["status"] in ("error", "missing")]
        for x in stopped:
            axes[0].axvspan(
                x - 0.5, x + 0.5, facecolor="white", edgecolor="#999999", hatch="////", linewidth=0, zorder=0
            )
        if stopped:
            axes[0].plot([], [], " ", label="hatched: the stage could not be compared alone")
        axes[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 1.02), ncols=3)
        if gains:
            axes[1].set_title("Gain: propagated error out of a stage ÷ into it")
            axes[1].axhline(1, color="#555555", linewidth=0.8)
            _draw_series(axes[1], gains, first=1)
            _log_ratio(axes[1], np.asarray([gain for values in gains.values() for gain in values if gain] or [1.0]))
        axes[-1].set_xlim(-0.5, max(len(stages), MIN_COLUMNS) - 0.5)
        _label_stages(axes[-1], stages)


def _draw_series(axes: Axes, series: Mapping[str, Sequence[float | None]], first: int) -> None:
    """Draws lines over the stages on a log scale; their styles count from `first`. Zeros, which such a scale has not, lie in
    a strip of their own below it.
    """
    positive = [value for values in series.values() for value in values if value]
    lowest, highest = min(positive, default=1e-3), max(positive, default=1e-2)
    has_zeros = any(0 in values for values in series.values())
    strip = lowest / 4
    for number, (label, values) in enumerate(series.items(), start=first):
        style = {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        line = [value or math.nan for value in values]  # a line does not lead to a zero
        axes.plot(line, linestyle=DASHES[number % len(DASHES)], linewidth=1.2, label=label, **style)
        zeros = [x for x, value in enumerate(values) if value == 0]
        axes.plot(zeros, [strip / 2] * len(zeros), linestyle="", **style)
    axes.set_yscale("log")
    axes.set_ylim(strip / 4 if has_zeros else lowest / 2, highest * 12)
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "" if value < strip else _power(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    if has_zeros:
        axes.axhspan(strip / 4, strip, facecolor="#eeeeee", linewidth=0, zorder=0)
        axes.annotate(
            "exact (0)", (1, strip / 2), (-2, -3), ("axes fraction", "data"), "offset points", ha="right", fontsize=8
        )


def _label_stages(axes: Axes, stages: Sequence[str]) -> None:
    """Names the stages under the x axis; if there are many, labels only every fifth layer, by its number."""
    if len(stages) <= MAX_LABELLED_STAGES:
        axes.set_xticks(range(len(stages)), stages)
        return
    layers = {x: layer_of(stage) for x, stage in enumerate(stages)}
    labels = {
        x: stages[x] if layer is None else str(layer) for x, layer in layers.items() if not layer or not layer % 5
    }
    axes.set_xticks(list(labels), list(labels.values()))
    for x, text in zip(labels, axes.get_xticklabels(), strict=True):
        text.set_rotation(90 if layers[x] is None else 0)


def _brief(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 1e4 else f"{value:.0e}"


@contextmanager
def _figure(
    output: Path, inches: tuple[float, float], layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Figure]:
    """A figure to draw on; the end of the block writes it to `output` as SVG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=inches, layout=layout)
        yield figure
        with replacing(output) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
