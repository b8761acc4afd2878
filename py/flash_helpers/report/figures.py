"""The five figures. Each returns a matplotlib figure, or None when the results don't hold its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.problem import Problem
from flash_helpers.report.data import OURS, Family, Report, family_label, seq_lens_of
from flash_helpers.report.style import FAINT, INK, PALETTE, RC, series_style


def tflops_over_length(report: Report) -> Figure | None:
    """One panel for each dtype, head size and mask; one line for each implementation."""
    families = report.families()
    columns = min(2, len(families))
    rows = math.ceil(len(families) / columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    peers = sorted({name for family in families for name in report.curves(family)} - {OURS})
    styles = {name: series_style(number) for number, name in enumerate([OURS, *peers])}
    for place, axis in enumerate(axes.flat):
        if place >= len(families):
            axis.set_axis_off()
            continue
        for name, curve in report.curves(families[place]).items():
            width = 2.4 if name == OURS else 1.2
            axis.plot(
                list(curve), list(curve.values()), label=name, linewidth=width, markersize=5, **styles[name]
            )
        lengths = sorted({s for curve in report.curves(families[place]).values() for s in curve})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [_length(s) for s in lengths])
        axis.minorticks_off()
        axis.set_title(family_label(families[place]), loc="left")
        if place % columns == 0:
            axis.set_ylabel("TFLOP/s")
    fastest = max(row.tflops(report.mode) or 0.0 for row in report.rows)
    for axis in axes.flat:  # shared, but each would still scale itself
        axis.set_ylim(0, 1.08 * fastest)
    handles = {
        label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    ordered = [name for name in [OURS, *peers] if name in handles]
    figure.legend([handles[n] for n in ordered], ordered, loc="lower center", ncols=min(6, len(ordered)),
                  bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    figure.supxlabel("sequence length", fontsize=10)
    figure.tight_layout()
    return figure


def ratio_heat_map(report: Report) -> Figure | None:
    """Best kernel over best peer, a panel for each family of kernels and element type.

    Purple: faster, orange: slower, the number in each field; colours mean the same in all panels.
    """
    panels = [(title, ratios) for title, part in report.parts() if (ratios := part.ratios())]
    if not panels:
        return None
    lengths = sorted({s for _, ratios in panels for s in seq_lens_of(ratios)})
    heights = [len(ratios) for _, ratios in panels]
    spread = max(
        [abs(v - 1) for _, ratios in panels for row in ratios.values() for v in row.values()] + [0.05]
    )
    figure = Figure(figsize=(1.6 + 0.85 * len(lengths), 0.42 * sum(heights) + 0.75 * len(panels) + 0.25))
    axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axis, (title, ratios) in zip(axes, panels, strict=True):
        _ratio_panel(axis, ratios, lengths, spread)
        axis.set_title(title, loc="left")
    axis.set_xlabel("sequence length")
    figure.tight_layout()
    return figure


def _ratio_panel(
    axis: Axes, ratios: dict[Family, dict[int, float]], lengths: Sequence[int], spread: float
) -> None:
    values = [[row.get(s, float("nan")) for s in lengths] for row in ratios.values()]
    axis.imshow(values, cmap="PuOr", vmin=1 - spread, vmax=1 + spread, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:
                dark = abs(value - 1) > 0.6 * spread
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(lengths)), [_length(s) for s in lengths])
    axis.set_yticks(range(len(ratios)), [family_label(family) for family in ratios])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def ladder_waterfall(report: Report) -> Figure | None:
    """What each step of the ladder gained or lost, as floating bars that add up to the last step."""
    found = report.ladder()
    return waterfall(*found) if found and len(found[1]) > 1 else None


def waterfall(problem: Problem, steps: Sequence[tuple[str, float]]) -> Figure:
    """Floating bars from each step's rate to the next one's.

    Args:
        problem: what they were measured on.
        steps: (name, TFLOP/s), in order.
    """
    figure = Figure(figsize=(7.5, 0.9 + 0.42 * len(steps)))
    axis = figure.subplots()
    previous = 0.0
    for place, (_, rate) in enumerate(steps):
        gain = rate - previous
        first = place == 0
        colour = PALETTE[5] if first else PALETTE[0] if gain >= 0 else PALETTE[1]
        hatch = "" if first or gain >= 0 else "///"
        axis.barh(place, gain, left=previous, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.5)
        note = f"{rate:.0f}" if first else f"{rate:.0f}  ({gain:+.0f}, ×{rate / previous:.2f})"
        axis.annotate(note, (max(rate, previous), place), (4, 0), textcoords="offset points", va="center")
        previous = rate
    axis.set_yticks(range(len(steps)), [name for name, _ in steps])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(rate for _, rate in steps))
    axis.set_xlabel("TFLOP/s")
    axis.set_title(problem.label(), loc="left")
    axis.grid(axis="y", visible=False)
    return figure


def roofline(report: Report) -> Figure | None:
    """Rate over FLOP per byte of the fewest bytes possible, under the card's memory and matrix roofs."""
    facts = _facts_of(report)
    ceiling = max(report.matrix_tflops.values(), default=0.0)
    if facts is None or not ceiling:
        return None
    bandwidth = facts.dram_bandwidth / 1e12  # TB/s: TFLOP/s at 1 FLOP a byte
    figure = Figure(figsize=(7.0, 3.6))
    axis = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in report.best_rows():
        name = OURS if row.kind == "kernel" else row.implementation
        intensity = row.problem.flop() / row.problem.min_bytes()
        points.setdefault(name, []).append((intensity, row.tflops(report.mode) or 0.0))
    intensities = [x for found in points.values() for x, _ in found]
    low, high = min([*intensities, ceiling / bandwidth]) / 2, max([*intensities, ceiling / bandwidth]) * 2
    axis.plot([low, ceiling / bandwidth, high], [low * bandwidth, ceiling, ceiling], color=INK, linewidth=1.2)
    axis.text(high, ceiling * 1.03, f"measured matrix product: {ceiling:.0f}", ha="right", va="bottom")
    for number, name in enumerate([OURS, *sorted(points.keys() - {OURS})]):
        if name in points:
            x, y = zip(*points[name], strict=True)
            axis.scatter(x, y, label=name, s=28, alpha=0.8, linewidths=0, **series_style(number))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    ticks = [2**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1, 2)]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    rates = [2**n for n in range(2, 11) if 2**n < 1.5 * ceiling]
    axis.set_yticks(rates, [f"{t:g}" for t in rates])
    lowest = min([y for found in points.values() for _, y in found], default=1.0)
    axis.set_ylim(lowest / 2, ceiling * 1.5)
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOP / byte")
    axis.set_ylabel("TFLOP/s")
    axis.legend(loc="lower right")
    return figure


def tuning_landscape(report: Report) -> Figure | None:
    """Every configuration of one problem: blocks along x, rate along y, flags as markers."""
    found = report.landscape()
    if found is None:
        return None
    problem, timed = found
    tiles = sorted({(c.B_r, c.B_c, c.n_warps) for c, _ in timed})
    kinds = sorted({_kind(c) for c, _ in timed})
    figure = Figure(figsize=(1.8 + 0.8 * len(tiles), 3.4))
    axis = figure.subplots()
    for number, kind in enumerate(kinds):
        x = [tiles.index((c.B_r, c.B_c, c.n_warps)) for c, _ in timed if _kind(c) == kind]
        y = [rate for c, rate in timed if _kind(c) == kind]
        shift = (number - (len(kinds) - 1) / 2) * 0.6 / max(1, len(kinds))
        axis.scatter([v + shift for v in x], y, label=kind, s=30, linewidths=0, **series_style(number))
    best, rate = max(timed, key=lambda pair: pair[1])
    axis.axhline(rate, color=FAINT, linewidth=1)
    axis.set_title(f"{problem.label()}\nbest {best.short_form()}: {rate:.0f} TFLOP/s", loc="left")
    axis.set_xticks(range(len(tiles)), [f"{r}, {c}\n{w} warps" for r, c, w in tiles])
    axis.set_xlabel("B_r, B_c, n_warps")
    axis.set_ylabel("TFLOP/s")
    axis.set_ylim(0.95 * min(r for _, r in timed), 1.05 * rate)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


FIGURES: dict[str, tuple[str, Callable[[Report], Figure | None]]] = {
    "tflops": ("TFLOP/s over sequence length", tflops_over_length),
    "ratio": ("Best kernel over best peer", ratio_heat_map),
    "ladder": ("The ladder: what each step gained", ladder_waterfall),
    "roofline": ("Roofline", roofline),
    "landscape": ("Tuning landscape", tuning_landscape),
}
"""File name to (title, function), in the order of the page."""


def draw(report: Report) -> dict[str, Figure]:
    """All figures that the results hold data for."""
    with matplotlib.rc_context(RC):
        drawn = {name: make(report) for name, (_, make) in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _kind(config: KernelConfig) -> str:
    """What sets configurations of equal blocks apart."""
    variant = direction_of(config).variant
    return "" if variant is None else variant(config)


def _facts_of(report: Report) -> DeviceFacts | None:
    name = report.rows[0].environment.get("gpu")
    return next((facts for facts in KNOWN_DEVICES.values() if facts.name == name), None)


def _length(seq_len: int) -> str:
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
