"""The formulas of a mod, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from flash_helpers.mods.operations import OPERATIONS, REDUCTIONS


class Node(Protocol):
    """What is read of a ``mod.Node``."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> Any: ...


def written(nodes: Sequence[Node], results: Iterable[tuple[str, int]]) -> str:
    """Its formulas, one a line; a value that is used several times has a line of its own.

    Captured numbers are n0, n1, …, captured tensors t0, t1, …
    """
    uses = Counter(arg for node in nodes for arg in node.args)
    uses.update(place for _, place in results)
    texts: list[str] = []
    lines: list[str] = []
    for place, node in enumerate(nodes):
        text = _formula(node, [texts[arg] for arg in node.args])
        if uses[place] > 1 and node.args:
            lines.append(f"x{place} = {text}")
            text = f"x{place}"
        texts.append(text)
    lines += [f"{name} = {_bare(texts[place])}" for name, place in results]
    return "\n".join(lines)


def _formula(node: Node, args: list[str]) -> str:
    if node.op == "constant":
        return repr(node.data)
    if node.op == "number":
        return f"n{node.data}"
    if node.op == "load":
        return f"t{node.data}[{', '.join(map(_bare, args))}]" if args else f"t{node.data}"
    if node.op in REDUCTIONS:
        return f"{node.op}({_bare(args[0])} for loop < {node.data})"
    if not args:
        return node.op
    sign = OPERATIONS[node.op].sign if node.op in OPERATIONS else ""
    if sign and len(args) == 2:
        return f"({args[0]} {sign} {args[1]})"
    return f"{sign}{args[0]}" if sign else f"{node.op}({', '.join(map(_bare, args))})"


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]
