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

    def affine(place: int) -> bool:
        node = mod.nodes[place]
        if of[place] <= Stage.HEAD:
            return True
        if node.kind is Kind.INT:
            # A sum of places, which is diagonal: each of them stands in it once.
            return diagonal[place] and node.op in ("sub", "add", "neg") and _sums_of_places(mod, place)
        if node.op in ("add", "sub", "neg", "to_float"):
            return all(affine(arg) for arg in node.args)
        if node.op == "mul":
            return any(of[arg] <= Stage.HEAD for arg in node.args) and all(affine(a) for a in node.args)
        if node.op == "divide":
            return of[node.args[1]] <= Stage.HEAD and affine(node.args[0])
        return False

    return all(affine(place) for _, place in terms)


def _sums_of_places(mod: Mod, place: int) -> bool:
    """Whether a whole number is made of places and of what the head has, by sums alone."""
    of, waiting = stages(mod), [place]
    while waiting:
        node = mod.nodes[waiting.pop()]
        if node.op in ("q", "k"):
            continue
        if node.op not in ("add", "sub", "neg"):
            return False
        waiting.extend(arg for arg in node.args if of[arg] > Stage.HEAD)
    return True
