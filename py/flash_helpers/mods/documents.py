"""Masks of documents: a query sees the keys of its own one, ``T[q_idx] == T[kv_idx]``, within a band or not.

Where each value of T is one run of places, documents are packed sequences, whose kernels are quicker than
those with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from flash_helpers.mods.mask_inputs import MASK
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.plain_forms import Band, Reader


class DocumentForm(NamedTuple):
    """A mod that says of which document a place is, and nothing else of a score.

    Attributes:
        tensor: the captured tensor that numbers the documents.
        by_item: it is indexed by the batch item before the place.
        band: the keys that are seen of a document.
    """

    tensor: int
    by_item: bool
    band: Band


@lru_cache(1024)
def document_form(mod: Mod, numbers: Sequence[int | float] = ()) -> DocumentForm | None:
    """What a mod says of documents; None: it says something else.

    Args:
        mod: with results ``score`` and ``visible``, as far as it has them.
        numbers: what it captured.
    """
    results = dict(mod.results)
    if list(results) != [MASK]:
        return None
    reader, band = Reader(mod, numbers), Band()
    found: set[tuple[int, bool]] = set()
    for term in _terms(mod, results[MASK]):
        if (said := reader.band(term)) is not None:
            band = band.within(said)
        elif (compared := _compared(mod, term)) is not None:
            found.add(compared)
        else:
            return None
    return DocumentForm(*found.pop(), band) if len(found) == 1 else None


def _terms(mod: Mod, place: int) -> Iterator[int]:
    """What is joined by ``&``."""
    node = mod.nodes[place]
    if node.op != "and":
        yield place
        return
    for arg in node.args:
        yield from _terms(mod, arg)


def _compared(mod: Mod, place: int) -> tuple[int, bool] | None:
    """(tensor, by_item) of ``T[q] == T[k]`` or ``T[b, q] == T[b, k]``, of whole numbers; None: of others."""
    node = mod.nodes[place]
    if node.op != "eq":
        return None
    one, other = (mod.nodes[arg] for arg in node.args)
    if (one.op, other.op) != ("load", "load") or one.data != other.data or one.kind is Kind.FLOAT:
        return None
    indices = [tuple(mod.nodes[arg].op for arg in load.args) for load in (one, other)]
    for by_item, before in ((False, ()), (True, ("b",))):
        if sorted(indices) == [(*before, "k"), (*before, "q")]:
            return one.data, by_item
    return None
