"""A mod as text and back: what an operator of PyTorch, and a graph that was saved with it, holds of one."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from flash_helpers.mods.mod import Element, Mod, Node, Number, TensorType
from flash_helpers.mods.operations import INDICES, OPERATIONS, REDUCTIONS, Kind

FORMAT = 1


@lru_cache(1024)
def encoded(mod: Mod) -> str:
    """The text of a mod, the same for equal mods.

    Args:
        mod: a mod without gradients of captured tensors.
    """
    if mod.gradients:
        raise ValueError("a mod with gradients of captured tensors has no text; encode the mod it is made of")
    parts = {
        "format": FORMAT,
        "nodes": [[node.op, int(node.kind), list(node.args), node.data] for node in mod.nodes],
        "results": [list(result) for result in mod.results],
        "numbers": [number.name for number in mod.numbers],
        "tensors": [[tensor.element.name, tensor.n_dims] for tensor in mod.tensors],
    }
    return json.dumps(parts, separators=(",", ":"))


@lru_cache(1024)
def decoded(text: str) -> Mod:
    """The mod of a text.

    Raises:
        ValueError: it is not the text of a mod, or that of another release's.
    """
    try:
        parts = json.loads(text)
        if parts["format"] != FORMAT:
            raise ValueError(f"its format is {parts['format']!r}; this release reads {FORMAT}")
        numbers = tuple(Number[name] for name in parts["numbers"])
        tensors = tuple(TensorType(Element[name], _natural(n)) for name, n in parts["tensors"])
        nodes = tuple(_node(entry, numbers, tensors) for entry in parts["nodes"])
        results = tuple((str(name), _natural(place)) for name, place in parts["results"])
        return Mod(nodes, results, numbers, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"this is not the text of a mod ({error}): {text:.80}. Record the graph again with this release"
        ) from None


def _natural(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"{x!r} is no whole number from 0 on")
    return x


def _node(entry: Any, numbers: tuple[Number, ...], tensors: tuple[TensorType, ...]) -> Node:
    """One node, of which everything is looked at that C++ is written of."""
    op, kind, args, data = entry
    node = Node(op, Kind(kind), tuple(_natural(arg) for arg in args), data)
    n: int | None = 0
    if op == "constant":
        fits = type(data) is {Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}[node.kind]
    elif op == "number":
        fits = _natural(data) < len(numbers) and numbers[data].kind is node.kind
    elif op == "load":
        fits = _natural(data) < len(tensors) and tensors[data].element.kind is node.kind
        n = tensors[data].n_dims if fits else None
    elif op in REDUCTIONS:
        fits, n = _natural(data) >= 0, 1
    else:
        fits = data is None and op in (*OPERATIONS, "where", "score", "loop", *INDICES)
        n = OPERATIONS[op].n if op in OPERATIONS else 3 if op == "where" else 0
    if not fits or len(node.args) != n:
        raise ValueError(f"{entry!r:.60} is no node")
    return node
