"""Functions that say what options say: a band of keys around the diagonal, a soft cap, nothing.

Kernels for options are quicker than kernels with a mod; so what can be said with an option is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flash_helpers.mods.builder import Builder
from flash_helpers.mods.mod import SMALL_NUMBER, Mod, Node
from flash_helpers.mods.operations import Kind


class Band(NamedTuple):
    """The keys that a query sees: ``low <= kv_idx - q_idx <= high``; None: no limit on that side."""

    low: int | None = None
    high: int | None = None

    def within(self, other: Band) -> Band:
        """What both say."""
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))


class PlainForm(NamedTuple):
    """What options say of a mod.

    Attributes:
        band: the keys that are seen.
        softcap: the bound of the scores; 0: none.
        rest: what no option says, with the same captured values; None: nothing is left.
    """

    band: Band
    softcap: float
    rest: Mod | None


def plain_form(
    mod: Mod, numbers: Sequence[int | float], bands: bool = True, softcap: bool = True
) -> PlainForm:
    """What options can say of a mod.

    Args:
        mod: with results ``score`` and ``visible``, as far as it has them.
        numbers: what it captured.
        bands: whether a band may be said with an option.
        softcap: whether a soft cap may.
    """
    reader = Reader(mod, numbers)
    results = dict(mod.results)
    band, cap = Band(), 0.0
    if (visible := results.get("visible")) is not None:
        found = reader.band(visible)
        if found is not None and (bands or found == Band()):
            band = found
            del results["visible"]
    if (score := results.get("score")) is not None:
        if mod.nodes[score].op == "score":
            del results["score"]
        elif softcap and (found_cap := reader.softcap(score)):
            cap = found_cap
            del results["score"]
    if len(results) == len(mod.results):
        return PlainForm(band, cap, mod)
    if not results:
        return PlainForm(band, cap, None)
    builder = Builder(mod.numbers, mod.tensors)
    places = builder.copy(mod)
    rest = builder.finish({name: places[at] for name, at in results.items()}, all_captured=True)
    return PlainForm(band, cap, rest)


def joined_terms(nodes: Sequence[Node], place: int) -> list[int]:
    """What is joined by ``&``, each once."""
    found: dict[int, None] = {}  # in order
    waiting, seen = [place], {place}
    while waiting:
        at = waiting.pop()
        if nodes[at].op != "and":
            found[at] = None
            continue
        new = [arg for arg in dict.fromkeys(nodes[at].args) if arg not in seen]
        seen.update(new)
        waiting.extend(reversed(new))
    return list(found)


_SUMS = ("add", "sub", "neg")


class Linear(NamedTuple):
    """``q * q_idx + k * kv_idx + offset``."""

    q: int
    k: int
    offset: int


class Reader:
    """Reads what parts of a mod say.

    Args:
        mod: whose nodes are read.
        numbers: what it captured.
    """

    def __init__(self, mod: Mod, numbers: Sequence[int | float]) -> None:
        self.nodes, self.numbers = mod.nodes, numbers
        self.sums: dict[int, Linear | None] = {}  # of nodes that were read: one may be a part of many

    # ------------------------------------------------------------------ masks
    def band(self, place: int) -> Band | None:
        """The band that a truth value says; None: it says something else."""
        found = Band()
        for term in joined_terms(self.nodes, place):
            if (band := self._band_of_term(term)) is None:
                return None
            found = found.within(band)
        return found

    def _band_of_term(self, place: int) -> Band | None:
        node = self.nodes[place]
        if node.op == "constant":
            return Band() if node.data else None
        if node.op not in ("lt", "le") or self.nodes[node.args[0]].kind is not Kind.INT:
            return None
        less, more = node.args
        strict = int(node.op == "lt")
        if self.nodes[less].op == "abs" and (limit := self.linear(more)) is not None:
            inner = self.linear(self.nodes[less].args[0])
            if inner is None or (limit.q, limit.k) != (0, 0):
                return None
            below = self._at_most(Linear(inner.q, inner.k, inner.offset - limit.offset + strict))
            above = self._at_most(Linear(-inner.q, -inner.k, -inner.offset - limit.offset + strict))
            return None if below is None or above is None else below.within(above)
        a, b = self.linear(less), self.linear(more)
        if a is None or b is None:
            return None
        return self._at_most(Linear(a.q - b.q, a.k - b.k, a.offset - b.offset + strict))

    @staticmethod
    def _at_most(x: Linear) -> Band | None:
        """The band of ``x <= 0``."""
        if abs(x.offset) > SMALL_NUMBER:
            return None
        if (x.q, x.k) == (-1, 1):
            return Band(high=-x.offset)
        if (x.q, x.k) == (1, -1):
            return Band(low=x.offset)
        return Band() if (x.q, x.k) == (0, 0) and x.offset <= 0 else None

    def linear(self, place: int) -> Linear | None:
        """A whole number as a sum of indices and a number; None: it is something else."""
        waiting = [place]
        while waiting:  # parts first: a sum may be longer than Python's stack
            at = waiting[-1]
            if at in self.sums:
                waiting.pop()
                continue
            parts = self.nodes[at].args if self.nodes[at].op in _SUMS else ()
            missing = [arg for arg in parts if arg not in self.sums]
            waiting.extend(missing)
            if not missing:
                self.sums[at] = self._sum(waiting.pop())
        return self.sums[place]

    def _sum(self, place: int) -> Linear | None:
        node = self.nodes[place]
        if node.op in ("q", "k"):
            return Linear(int(node.op == "q"), int(node.op == "k"), 0)
        if node.op in ("constant", "number") and node.kind is Kind.INT:
            value = node.data if node.op == "constant" else self.numbers[node.data]
            return Linear(0, 0, int(value)) if abs(value) <= SMALL_NUMBER else None
        if node.op not in _SUMS or node.kind is not Kind.INT:
            return None
        parts = [self.linear(arg) for arg in node.args]
        if any(part is None for part in parts):
            return None
        first = parts[0] if node.op != "neg" else Linear(0, 0, 0)
        second = parts[-1]
        assert first is not None
        assert second is not None
        sign = 1 if node.op == "add" else -1
        found = Linear(*(a + sign * b for a, b in zip(first, second, strict=True)))
        return found if max(map(abs, found)) <= SMALL_NUMBER else None

    # ------------------------------------------------------------------ scores
    def softcap(self, place: int) -> float:
        """The cap of ``cap * tanh(score / cap)``; 0: it is something else."""
        node = self.nodes[place]
        if node.op != "mul":
            return 0.0
        for outer, inner in (node.args, node.args[::-1]):
            if self.nodes[inner].op != "tanh":
                continue
            quotient = self.nodes[self.nodes[inner].args[0]]
            if quotient.op != "divide" or self.nodes[quotient.args[0]].op != "score":
                continue
            cap, divisor = self.real(outer), self.real(quotient.args[1])
            if cap is not None and cap == divisor and 1e-30 < cap < 1e30:
                return cap
        return 0.0

    def real(self, place: int) -> float | None:
        """A captured number or a constant; None: it is something else."""
        node = self.nodes[place]
        if node.op == "to_float":
            node = self.nodes[node.args[0]]
        if node.op == "constant":
            return float(node.data)
        return float(self.numbers[node.data]) if node.op == "number" else None
