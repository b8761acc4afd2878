"""What of a score function can be found before the score is there, for many scores at once.

A *row load* reads a tensor at places of which all but the last follow from the query or less: where the row
lies is found once a row. One of 16 bit elements whose last index is the key itself is *streamed*: a thread
reads eight keys of a row at once. A *diagonal* value depends on the distance between key and query, beside
batch item and head: those of a warp's 16 queries and n keys are n + 15 numbers.
"""

from __future__ import annotations

from flash_helpers.mods.mod import Element, Mod
from flash_helpers.mods.operations import LOAD_COST, OPERATIONS, REDUCTIONS, WHERE_COST, Kind
from flash_helpers.mods.stages import Stage, joined, loops, needed, stages

STREAMED = (Element.FP16, Element.BF16)
COPIED_DIMS = 4  # of a tensor of which tiles are copied
_ROW_STAGES = (Stage.ONCE, Stage.HEAD, Stage.ROW)
_CHEAPEST = 1.0  # a diagonal value of fewer instructions is computed for each score


def row_loads(mod: Mod) -> dict[int, Stage]:
    """The loads whose row is found earlier than their element: of each the stage of the row."""
    of, inside = stages(mod), loops(mod)
    found = {}
    for place, node in enumerate(mod.nodes):
        if node.op == "load" and len(node.args) >= 2 and not inside[place]:
            stage = Stage.ONCE
            for arg in node.args[:-1]:
                stage = joined(stage, of[arg])
            if of[place] in (Stage.COLUMN, Stage.ELEMENT) and stage in _ROW_STAGES:
                found[place] = stage
    return found


def streamed_load(mod: Mod) -> int | None:
    """The load whose elements are read ahead of the scores; None: there is none."""
    used = needed(mod, "score")
    for place, stage in row_loads(mod).items():
        node = mod.nodes[place]
        of_key = mod.nodes[node.args[-1]].op == "k"
        if used[place] and stage is Stage.ROW and of_key and mod.tensors[node.data].element in STREAMED:
            return place
    return None


def streamed_axis(mod: Mod) -> int | None:
    """The dimension of the streamed tensor that queries count, where nothing else of its row depends on the
    query: then rows of neighbouring queries are equally far apart. None: of no other."""
    place = streamed_load(mod)
    if place is None:
        return None
    of, rows = stages(mod), mod.nodes[place].args[:-1]
    own = [axis for axis, arg in enumerate(rows) if of[arg] > Stage.HEAD]
    return own[0] if len(own) == 1 and mod.nodes[rows[own[0]]].op == "q" else None


def copied_load(mod: Mod) -> int | None:
    """The streamed load, where copies can bring tiles of its tensor to Hopper's forward kernels
    (``streams_tiles`` in known_ahead.cuh), which look for no tiles of a mask then; None: they can't."""
    place = streamed_load(mod)
    if place is None or streamed_axis(mod) is None or mod.result("visible") is not None:
        return None
    return place if mod.tensors[mod.nodes[place].data].n_dims <= COPIED_DIMS else None


def diagonal_nodes(mod: Mod) -> list[bool]:
    """Which nodes depend on query and key by their distance alone."""
    of, inside = stages(mod), loops(mod)
    slopes = _slopes(mod)
    found: list[bool] = []
    for place, node in enumerate(mod.nodes):
        slope = slopes[place]
        if slope is not None and slope != (0, 0):
            found.append(sum(slope) == 0)
        else:
            below = [arg for arg in node.args if of[arg] > Stage.HEAD]
            own = node.op not in REDUCTIONS and not inside[place]
            found.append(own and bool(below) and all(found[arg] for arg in below))
    return found


def diagonal_value(mod: Mod) -> int | None:
    """The costliest real number of a score that depends on the distance alone; None: there is none."""
    root = mod.result("score")
    if root is None:
        return None
    diagonal = diagonal_nodes(mod)
    ends = set()  # those that another value is made of
    waiting, seen = [root], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        if diagonal[place] and mod.nodes[place].kind is Kind.FLOAT:
            ends.add(place)
        else:
            waiting.extend(mod.nodes[place].args)
    costs = {place: diagonal_cost(mod, place) for place in ends}
    costly = [place for place in sorted(costs) if costs[place] > _CHEAPEST]
    return max(costly, key=lambda place: costs[place], default=None)


def diagonal_cost(mod: Mod, root: int) -> float:
    """About how many instructions a diagonal value takes, of what is not known of the head."""
    of = stages(mod)
    total, waiting, seen = 0.0, [root], set()
    while waiting:
        place = waiting.pop()
        node = mod.nodes[place]
        if place in seen or of[place] <= Stage.HEAD:
            continue
        seen.add(place)
        waiting.extend(node.args)
        if node.op == "load":
            total += LOAD_COST
        elif node.op == "where":
            total += WHERE_COST
        elif node.op in OPERATIONS:
            total += OPERATIONS[node.op].cost
    return total


def _slopes(mod: Mod) -> list[tuple[int, int] | None]:
    """Of a whole number that is a q + b k + something of the head a and b; None: of others."""
    of = stages(mod)
    found: list[tuple[int, int] | None] = []
    for place, node in enumerate(mod.nodes):
        slope: tuple[int, int] | None = None
        args = [found[arg] for arg in node.args]
        if node.op in ("q", "k"):
            slope = (int(node.op == "q"), int(node.op == "k"))
        elif of[place] <= Stage.HEAD:
            slope = (0, 0)
        elif node.kind is Kind.INT and node.op in ("add", "sub", "neg") and None not in args:
            known = [arg for arg in args if arg is not None]
            sign = -1 if node.op in ("sub", "neg") else 1
            first = known[0] if len(known) == 2 else (0, 0)
            slope = (first[0] + sign * known[-1][0], first[1] + sign * known[-1][1])
        found.append(slope)
    return found
