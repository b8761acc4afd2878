"""Writes docs/mods-gallery.md and its pictures: masks by their tiles, formulas, costs, and measured times.

    python tools/mods_gallery.py [--results benchmarks/results/h200-mods.json …]

A picture has a square for each tile of 128 queries and 128 keys: empty, divided or full, as the pairs say.
Times are those of ``benchmarks/mods.py``, of a function those of the last file that has it; without result
files the page says that nothing was measured.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gallery_functions import MASKS, SCORES, SEQ, Entry
from torch import Tensor

from flash_attention.mods import Traced, trace
from flash_attention.mods.evaluate import evaluate
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.mods.stages import Stage
from flash_helpers.mods.text import cost
from flash_helpers.mods.tiles import Tile, Tiling, tiles

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "mods-gallery.md", ROOT / "docs" / "mods-figures"
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = [FOLDER / f"h200-mods{name}.json" for name in ("", "-gallery", "-later")]
B, SQUARE = 128, 8
MEASURED = (4096, 128)  # length and head size of the times on the page
COLOURS = {Tile.EMPTY: "#e8e8ef", Tile.PARTIAL: "#8da0dc", Tile.FULL: "#3f51b5"}
BESIDE = {
    "twin": "the built-in option",
    "plain": "neither mask nor score function",
    "flex": "compiled flex_attention",
}
PRELUDE = """import math

import torch

SEQ, HEADS = 3072, 16
BLOCK, WINDOW, WIDTH = 96, 512, 64
DOCUMENT = torch.repeat_interleave(torch.arange(5), torch.tensor([300, 900, 172, 1200, 500]))
TABLE = torch.linspace(-1, 1, HEADS * 32).view(HEADS, 32)  # of 32 buckets
BIAS = torch.zeros(HEADS, SEQ, SEQ, dtype=torch.bfloat16)"""
INTRODUCTION = """# A gallery of masks and score functions

Each function is passed as it stands here: `attention(q, k, v, mask_mod=causal)`,
`attention(q, k, v, score_mod=alibi)`. [Masks and score functions of your own](mods.md) says how they are
read. `python tools/mods_gallery.py` writes this page.

A picture shows the tiles of 128 queries (down) and 128 keys (across) of {seq} tokens: empty ones are light,
full ones dark, and of the others the mask is looked at score by score. Interval arithmetic on the mask tells
them without a list; where a mask reads tensors, it tells less.

{times}
"""


# ---------------------------------------------------------------------- tiles
def tiles_by_pairs(traced: Traced) -> Tensor:
    """The ``Tile`` of each tile, (rows, columns), as the pairs say."""
    rows = []
    zero, k = torch.zeros((), dtype=torch.int64), torch.arange(SEQ)
    for first in range(0, SEQ, B):
        q = torch.arange(first, first + B)[:, None]
        seen = evaluate(traced, "visible", None, zero, zero, q, k).expand(B, SEQ)
        by_tile = seen.unflatten(1, (-1, B))
        full, some = by_tile.all(2).all(0), by_tile.any(2).any(0)
        rows.append(torch.where(full, int(Tile.FULL), torch.where(some, int(Tile.PARTIAL), int(Tile.EMPTY))))
    return torch.stack(rows)


def picture(found: Tensor) -> str:
    """An SVG, equal tiles of a row in one rectangle."""
    n_rows, n_columns = found.shape
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{n_columns * SQUARE}" height="{n_rows * SQUARE}" '
        f'viewBox="0 0 {n_columns} {n_rows}" shape-rendering="crispEdges">'
    ]
    for row, kinds in enumerate(found.tolist()):
        first = 0
        for column in range(1, n_columns + 1):
            if column == n_columns or kinds[column] != kinds[first]:
                colour = COLOURS[Tile(kinds[first])]
                lines.append(
                    f'<rect x="{first}" y="{row}" width="{column - first}" height="1" fill="{colour}"/>'
                )
                first = column
    return "\n".join([*lines, "</svg>", ""])


def of_mask(entry: Entry, traced: Traced) -> tuple[str, str]:
    """The picture of a mask, and a sentence on its tiles."""
    found = tiles_by_pairs(traced)
    by_bounds = torch.from_numpy(tiles(traced.mod, Tiling(SEQ, SEQ, B, B), traced.numbers))
    assert not ((by_bounds != Tile.PARTIAL) & (by_bounds != found)).any(), (
        entry.title
    )  # bounds are never wrong
    shares = [float((found == kind).float().mean()) for kind in (Tile.EMPTY, Tile.FULL)]
    decided = found != Tile.PARTIAL
    told = float((by_bounds != Tile.PARTIAL)[decided].float().mean()) if decided.any() else 1.0
    text = f"{shares[0]:.0%} of the tiles are empty, {shares[1]:.0%} full. Bounds tell "
    text += "all of these." if told == 1 else "none of these." if told == 0 else f"{told:.0%} of these."
    return picture(found), text


# ---------------------------------------------------------------------- the page
def section(entry: Entry, times: dict[tuple[str, str], float]) -> tuple[str, str | None]:
    """Of one function its text, and its picture if it is a mask."""
    is_mask = entry in MASKS
    traced = trace(mask_mod=entry.function) if is_mask else trace(entry.function)
    name = entry.function.__name__
    parts = [f"## {entry.title}", f"```python\n{inspect.getsource(entry.function).rstrip()}\n```"]
    drawn = None
    if is_mask:
        drawn, text = of_mask(entry, traced)
        parts += [f"![Tiles of the mask {name}](mods-figures/{name}.svg)", text]
    element = cost(traced.mod).instructions[Stage.ELEMENT]
    loads = cost(traced.mod).loads[Stage.ELEMENT]
    reads = f" with {_counted(loads, 'load')}" if loads else ""
    parts.append(f"About {_counted(element, 'instruction')} a score{reads}. {speed(entry, times)}")
    return "\n\n".join(parts), drawn


def _counted(n: float, what: str) -> str:
    return f"{n:.0f} {what}" + ("" if round(n) == 1 else "s")


def speed(entry: Entry, times: dict[tuple[str, str], float]) -> str:
    """What was measured of a function, in a sentence."""
    if (entry.feature, "mod") not in times:
        return "Its speed: not measured yet."
    return f"Its speed: {_beside(entry, times)}."


def _beside(entry: Entry, times: dict[tuple[str, str], float]) -> str:
    """A file may say once, as a feature of its own, what is the same for all functions."""
    said = [
        f"{words} {other:.3f} ms"
        for variant, words in BESIDE.items()
        if (other := times.get((entry.feature, variant), times.get((variant, variant)))) is not None
    ]
    return "; ".join([f"{times[entry.feature, 'mod']:.3f} ms", *said])


def measured(paths: Sequence[Path]) -> tuple[dict[tuple[str, str], float], str]:
    """Milliseconds by feature and variant, and what they were measured on."""
    paths = [path for path in paths if path.exists()]
    if not paths:
        return {}, "Speeds were not measured yet: `python benchmarks/mods.py --json FILE` does."
    found: dict[tuple[str, str], float] = {}
    for path in paths:
        rows: list[dict[str, Any]] = [
            row
            for row in ResultFile.load(path).rows
            if (row["problem"]["seq_len_q"], row["problem"]["d_head"]) == MEASURED and row["milliseconds"]
        ]
        if not rows:
            raise SystemExit(f"{path} has no times of {MEASURED[0]} tokens and head size {MEASURED[1]}")
        again = {row["feature"] for row in rows}
        found = {name: ms for name, ms in found.items() if name[0] not in again}
        found |= {(row["feature"], row["variant"]): row["milliseconds"]["hot"]["median"] for row in rows}
    facts, problem = rows[0]["environment"], rows[0]["problem"]
    files = ", ".join(f"`{path.relative_to(ROOT) if ROOT in path.parents else path.name}`" for path in paths)
    text = (
        f"Speeds are of the forward pass on an {facts['gpu'].removeprefix('NVIDIA ')} in bfloat16: "
        f"{problem['batch']} items of {MEASURED[0]} tokens, {problem['n_heads']} heads of {MEASURED[1]}, "
        f"torch {facts['torch']} ({files})."
    )
    return found, text


def written(results: Sequence[Path]) -> dict[Path, str]:
    """The page and its pictures, by path."""
    times, said = measured(results)
    made: dict[Path, str] = {}
    sections = []
    for entry in (*MASKS, *SCORES):
        text, drawn = section(entry, times)
        sections.append(text)
        if drawn is not None:
            made[FIGURES / f"{entry.function.__name__}.svg"] = drawn
    top = INTRODUCTION.format(seq=SEQ, times=said)
    made[PAGE] = "\n\n".join([top + f"\n```python\n{PRELUDE}\n```", *sections]) + "\n"
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", default=RESULTS, help="of benchmarks/mods.py")
    for path, text in written(parser.parse_args().results).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
