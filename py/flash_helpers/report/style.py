"""How figures look: one palette for colour-blind readers, and ink that follows light and dark pages."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008), without yellow and black, which vanish on light or dark.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # each series differs in shape too

INK = "#123456"  # stands for the page's text colour until the SVG is written
FAINT = "#123457"  # the same for grids

RC: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text: it scales, can be searched, and takes the page's font
    "svg.hashsalt": "flash-attention",  # equal input gives equal files
}


def series_style(number: int) -> dict[str, Any]:
    """Colour and marker of the n-th series."""
    return {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element for inlining: ink is ``currentColor``, and it has a title for readers."""
    text = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(INK, "currentColor").replace(FAINT, "var(--grid, #8884)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px sans-serif", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace(">", f' role="img" aria-label="{title}">', 1)


def to_png(figure: Figure) -> bytes:
    """The figure on white, for places that show no SVG."""
    for artist in figure.findobj():
        for name in ("color", "edgecolor", "facecolor", "markeredgecolor"):
            _replace_ink(artist, name)
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=160, bbox_inches="tight", facecolor="white", metadata={"Software": None}
    )
    return buffer.getvalue()


def standalone(svg: str) -> str:
    """An SVG file that is readable on any background: dark ink on a white sheet."""
    return svg.replace("<svg ", '<svg style="color:#222;background:#fff;--grid:#ddd" ', 1)


def _replace_ink(artist: Any, name: str) -> None:
    """Turns stand-in colours into dark grey where an artist has the property."""
    get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
    if get is None or put is None:
        return
    try:
        value = to_hex(get())
    except (TypeError, ValueError):
        return  # a list of colours: data, which never uses the stand-ins
    if value in (INK, FAINT):
        put("#222222" if value == INK else "#dddddd")
