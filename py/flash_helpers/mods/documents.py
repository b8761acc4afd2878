"""Masks of documents: a query sees the keys of its own one, ``T[q_idx] == T[kv_idx]``, within a band or not.

Where each value of T is one run of places, documents are packed sequences, whose kernels are quicker than
those with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from flash_helpers.mods.mask_inputs import MASK
from flash_helpers.mods.mod import Element, Mod, Node
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.plain_forms import Band, Linear, Reader, joined_terms


class DocumentForm(NamedTuple):
    """A mod that says of which document a place is, and nothing else of a score.

    Attributes:
        tensor: the captured tensor that numbers the documents.
        by_item: it is indexed by the batch item before the place.
        band: the keys that are seen of a document.
        small: captured tensors of 64 bit elements, of which it holds if they are of 32 bits.
    """

    tensor: int
    by_item: bool
    band: Band
    small: tuple[int, ...] = ()


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
    terms = joined_terms(mod.nodes, results[MASK])
    found = {said for term in terms if (said := _compared(mod, term)) is not None}
    if len(found) != 1:
        return None
    (tensor, by_item), band = found.pop(), Band()
    reader = _Within(mod, numbers, tensor, by_item)
    for term in terms:
        if _compared(mod, term) is None:
            limits = reader.band(term)
            if limits is None or not reader.holds_anywhere(term):
                return None
            band = band.within(limits)
    return DocumentForm(tensor, by_item, band, tuple(sorted(reader.small)))


class _Within(Reader):
    """Reads bands of a query and a key of one document: what is loaded by the document's number, such as its
    first place, is the same for both.

    Attributes:
        forms: of each node a number, equal where it computes the same of the document's number; None: it
            depends on a place.
        values: what is taken for loads, by their forms.
        small: tensors of 64 bit elements that are loaded so. Sums of others do not wrap around.
    """

    def __init__(self, mod: Mod, numbers: Sequence[int | float], tensor: int, by_item: bool) -> None:
        super().__init__(mod, numbers)
        self.tensors = mod.tensors
        self.forms: list[int | None] = []
        self.values: dict[int, int] = {}
        self.small: set[int] = set()
        known: dict[Any, int] = {}
        for node in mod.nodes:
            args = [self.forms[arg] for arg in node.args]
            is_number = node.op == "load" and node.data == tensor and _place(mod, node, by_item) is not None
            if node.op in ("q", "k") or (None in args and not is_number):
                self.forms.append(None)
            else:
                said = "number" if is_number else (node.op, node.kind, node.data, *args)
                self.forms.append(known.setdefault(said, len(known)))

    def _sum(self, place: int) -> Linear | None:
        node, form = self.nodes[place], self.forms[place]
        if form is not None and node.op == "load" and node.kind is Kind.INT:
            if self.tensors[node.data].element is Element.INT64:
                self.small.add(node.data)
            return Linear(0, 0, self.values.setdefault(form, 0))
        return super()._sum(place)

    def holds_anywhere(self, term: int) -> bool:
        """Whether a term that says a band says it whatever was loaded: its sums cancel that."""
        before = self._compared_sums(term)
        for form in tuple(self.values):
            self.values[form] = 1
            self.sums.clear()
            again = self._compared_sums(term)
            self.values[form] = 0
            self.sums.clear()
            if again != before:
                return False
        return True

    def _compared_sums(self, term: int) -> Any:
        """What a comparison compares; None: it says nothing of places, or its numbers are too large."""
        if not (args := self.nodes[term].args):
            return None
        less, more = args
        if self.nodes[less].op == "abs":
            return self.linear(self.nodes[less].args[0]), self.linear(more)
        one, other = self.linear(less), self.linear(more)
        return None if one is None or other is None else [a - b for a, b in zip(one, other, strict=True)]


def _compared(mod: Mod, place: int) -> tuple[int, bool] | None:
    """(tensor, by_item) of ``T[q] == T[k]`` or ``T[b, q] == T[b, k]``, of whole numbers; None: of others."""
    node = mod.nodes[place]
    if node.op != "eq":
        return None
    one, other = (mod.nodes[arg] for arg in node.args)
    if (one.op, other.op) != ("load", "load") or one.data != other.data or one.kind is Kind.FLOAT:
        return None
    for by_item in (False, True):
        if {_place(mod, load, by_item) for load in (one, other)} == {"q", "k"}:
            return one.data, by_item
    return None


def _place(mod: Mod, load: Node, by_item: bool) -> str | None:
    """Which place a load is indexed by, alone or behind the batch item; None: by something else."""
    *before, last = (mod.nodes[arg].op for arg in load.args) if load.args else ("",)
    return last if last in ("q", "k") and before == ["b"] * by_item else None
