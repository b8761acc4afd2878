"""What the values of a mod depend on, and so how often each is computed."""

from __future__ import annotations

from enum import IntEnum

from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import REDUCTIONS


class Stage(IntEnum):
    """From once to most often. ROW and COLUMN do not include each other; together they are ELEMENT."""

    ONCE = 0
    HEAD = 1
    ROW = 2
    COLUMN = 3
    ELEMENT = 4


_OF_LEAF = {"b": Stage.HEAD, "h": Stage.HEAD, "q": Stage.ROW, "k": Stage.COLUMN, "score": Stage.ELEMENT}


def joined(a: Stage, b: Stage) -> Stage:
    """That of a value which depends on values of both."""
    return Stage.ELEMENT if {a, b} == {Stage.ROW, Stage.COLUMN} else max(a, b)


def stages(mod: Mod) -> list[Stage]:
    """The stage of each node."""
    found: list[Stage] = []
    for node in mod.nodes:
        stage = _OF_LEAF.get(node.op, Stage.ONCE)
        for arg in node.args:
            stage = joined(stage, found[arg])
        found.append(stage)
    return found


def loops(mod: Mod) -> list[bool]:
    """Whether each node has a value for each step of a reduction around it."""
    found: list[bool] = []
    for node in mod.nodes:
        inside = node.op not in REDUCTIONS and any(found[arg] for arg in node.args)
        found.append(node.op == "loop" or inside)
    return found


def needed(mod: Mod, *results: str) -> list[bool]:
    """Which nodes some results are made of."""
    found = [False] * len(mod.nodes)
    for name in results:
        place = mod.result(name)
        if place is not None:
            found[place] = True
    for place in range(len(mod.nodes) - 1, -1, -1):
        if found[place]:
            for arg in mod.nodes[place].args:
                found[arg] = True
    return found
