"""A mod in words: its formulas, and what they cost at each stage."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.mods.intervals import intervals
from flash_helpers.mods.mod import Element, Mod, Node
from flash_helpers.mods.operations import LOAD_COST, OPERATIONS, REDUCTIONS, WHERE_COST, Kind
from flash_helpers.mods.stages import Stage, loops, needed, stages


@dataclass(frozen=True)
class Cost:
    """About how many instructions a mod takes of a thread, by how often they run.

    Attributes:
        instructions: at each stage.
        loads: elements of captured tensors read at each stage.
    """

    instructions: dict[Stage, float]
    loads: dict[Stage, int]


def cost(mod: Mod) -> Cost:
    """The cost of all results of a mod."""
    found, loads = dict.fromkeys(Stage, 0.0), dict.fromkeys(Stage, 0)
    inside = loops(mod)
    wanted = needed(mod, *(name for name, _ in mod.results))
    times, stage_of = _times(mod, inside)
    for place, node in enumerate(mod.nodes):
        if not wanted[place] or not (node.args or node.op == "load"):
            continue
        found[stage_of[place]] += times[place] * _cost_of(mod, node)
        loads[stage_of[place]] += times[place] * (node.op == "load")
    return Cost(found, loads)


def _times(mod: Mod, inside: list[bool]) -> tuple[list[int], list[Stage]]:
    """How often a node is computed in its stage; within a loop both are those of the loop."""
    times, stage_of = [1] * len(mod.nodes), stages(mod)
    for place in range(len(mod.nodes) - 1, -1, -1):
        node = mod.nodes[place]
        if node.op in REDUCTIONS or inside[place]:
            for arg in node.args:
                if inside[arg]:
                    times[arg] = node.data if node.op in REDUCTIONS else times[place]
                    stage_of[arg] = max(stage_of[arg], stage_of[place])
    return times, stage_of


def _cost_of(mod: Mod, node: Node) -> float:
    if node.op == "load":
        return LOAD_COST + 2 * len(node.args)
    if node.op == "where":
        return WHERE_COST
    if node.op in REDUCTIONS:
        return node.data * REDUCTIONS[node.op].cost
    if node.op in ("floor_divide", "remainder"):
        divisor = mod.nodes[node.args[1]]
        if divisor.op == "constant" and isinstance(divisor.data, int) and divisor.data > 0:
            return 1.0 if divisor.data & (divisor.data - 1) == 0 else 4.0
    return OPERATIONS[node.op].cost


def explained(mod: Mod) -> str:
    """The formulas, then the cost by stage."""
    names = {
        Stage.ONCE: "once", Stage.HEAD: "a head", Stage.ROW: "a query", Stage.COLUMN: "a key",
        Stage.ELEMENT: "an element",
    }  # fmt: skip
    found = cost(mod)
    lines = [str(mod), ""]
    for stage, name in names.items():
        if found.instructions[stage]:
            loads = found.loads[stage]
            reads = f", {loads} loads" if loads > 1 else ", 1 load" if loads else ""
            lines.append(f"{name}: about {found.instructions[stage]:.0f} instructions{reads}")
    if len(lines) == 2:
        lines.append("no instructions")
    if wide := wide_tensors(mod):
        held = ", ".join(f"t{i}" for i in wide)
        lines.append(f"of an element some have 64 bits, as what {held} holds; of int32 it would have 32")
    return "\n".join(lines)


def wide_tensors(mod: Mod) -> tuple[int, ...]:
    """The captured tensors of 64 bits for which arithmetic on each element has 64 bits, too."""
    bounds, stage_of = intervals(mod), stages(mod)
    wanted = needed(mod, *(name for name, _ in mod.results))
    sources: list[set[int]] = []
    found: set[int] = set()
    for place, node in enumerate(mod.nodes):
        if node.op == "load":
            own = {node.data} if mod.tensors[node.data].element is Element.INT64 else set()
        else:
            wide = [a for a in node.args if mod.nodes[a].kind is Kind.INT and not bounds[a].in_32_bits]
            own = set().union(*(sources[a] for a in wide))
            if wanted[place] and stage_of[place] is Stage.ELEMENT:
                found |= own
        sources.append(own)
    return tuple(sorted(found))
