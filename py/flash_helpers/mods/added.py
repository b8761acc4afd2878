"""Score functions that add to a score what depends on the distance between key and query, and on the head.

Such a sum can begin with what is added: it is there before the product that makes the score.
"""

from __future__ import annotations

from flash_helpers.mods.ahead import diagonal_nodes
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.stages import Stage, stages

Term = tuple[int, int]  # 1 or -1, and a node


def added_terms(mod: Mod) -> tuple[Term, ...]:
    """What is added to a score that is nothing else: terms of the distance, and of the head. Empty: no score
    is made so, or with other terms, or nothing is of the distance."""
    place = mod.result("score")
    if place is None:
        return ()
    diagonal, of = diagonal_nodes(mod), stages(mod)
    terms: list[Term] = []
    while mod.nodes[place].op != "score":
        node = mod.nodes[place]
        if node.op not in ("add", "sub"):
            return ()
        first, second = node.args
        sign = 1 if node.op == "add" else -1
        if (sign == 1 and of[first] <= Stage.HEAD) or diagonal[first]:
            first, second = second, first
            if sign == -1:
                return ()
        if (not diagonal[second] and of[second] > Stage.HEAD) or mod.nodes[second].kind is not Kind.FLOAT:
            return ()
        terms.append((sign, second))
        place = first
    return tuple(reversed(terms)) if any(diagonal[term] for _, term in terms) else ()


def adds_evenly(mod: Mod) -> bool:
    """Whether what is added grows by the same number from each distance to the next, as ALiBi does."""
    terms = added_terms(mod)
    return bool(terms) and _is_affine(mod, terms)


def _is_affine(mod: Mod, terms: tuple[Term, ...]) -> bool:
    diagonal, of = diagonal_nodes(mod), stages(mod)
    sums = _sums_of_places(mod, of)
    found: list[bool] = []
    for place, node in enumerate(mod.nodes):  # operands stand before
        if of[place] <= Stage.HEAD:
            is_affine = True
        elif node.kind is Kind.INT:
            # A sum of places, which is diagonal: each of them stands in it once.
            is_affine = diagonal[place] and node.op in ("sub", "add", "neg") and sums[place]
        elif node.op in ("add", "sub", "neg", "to_float"):
            is_affine = all(found[arg] for arg in node.args)
        elif node.op == "mul":
            is_affine = any(of[a] <= Stage.HEAD for a in node.args) and all(found[a] for a in node.args)
        else:
            is_affine = node.op == "divide" and of[node.args[1]] <= Stage.HEAD and found[node.args[0]]
        found.append(is_affine)
    return all(found[place] for _, place in terms)


def _sums_of_places(mod: Mod, of: list[Stage]) -> list[bool]:
    """Which nodes are made of places and of what the head has, by sums alone."""
    found: list[bool] = []
    for node in mod.nodes:
        is_sum = node.op in ("add", "sub", "neg")
        found.append(
            node.op in ("q", "k") or (is_sum and all(found[a] or of[a] <= Stage.HEAD for a in node.args))
        )
    return found
