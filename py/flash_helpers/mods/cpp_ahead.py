"""The part of a mod's struct that is about what is known before the scores are (``ahead``), as C++.

static constexpr bool kStreams, kHasDiagonal;    // whether there are the functions below
static constexpr int kDiagonalCost;              // about how many instructions one of its values takes
static auto streamed_row(row);                   // a flash::mods::RowOf, whose elements keys count
static int64_t streamed_stride(captured);
static constexpr bool kStreamsEvenly;            // rows of neighbouring queries are streamed_step apart
static int64_t streamed_step(captured);
static constexpr StreamedTensor kStreamedTensor; // which tensor it is, and which dimension queries count
static OuterPlace streamed_place(captured, once, head, b, h);        // where in its other dimensions
static float diagonal(captured, once, head, b, h, distance);         // key - query
static float score_ahead(captured, once, head, row, column, ahead, score, b, h, q, k);
    // the score; ahead: a flash::mods::Ahead of its place
static constexpr bool kAddsOfDistance;           // whether a score is the given one and `added`, no more
static constexpr bool kAddsEvenly;               // … which grows by the same number with each distance
static float added(captured, once, head, b, h, distance);
"""

from __future__ import annotations

from typing import Protocol

from flash_helpers.mods.added import Term, added_terms, adds_evenly
from flash_helpers.mods.ahead import diagonal_cost, diagonal_value, streamed_axis, streamed_load
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.stages import Stage


class ElementWriter(Protocol):
    """What is asked of the writer of the struct (``cpp``)."""

    mod: Mod
    stages: list[Stage]
    divides_shortly: bool

    def _inline(self, place: int) -> bool: ...
    def _type(self, place: int) -> str: ...
    def _value(self, place: int, stage: Stage) -> str: ...
    def _statement(self, place: int, stage: Stage, indent: str) -> list[str]: ...
    def _signature(self, stage: Stage, score: bool = False) -> str: ...


class AheadWriter:
    """Writes it with the means of the writer of the struct."""

    def __init__(self, writer: ElementWriter) -> None:
        self.writer = writer
        self.mod: Mod = writer.mod
        self.streamed, self.diagonal = streamed_load(self.mod), diagonal_value(self.mod)

    def lines(self) -> list[str]:
        streams, has_diagonal = self.streamed is not None, self.diagonal is not None
        cost = 0 if self.diagonal is None else round(diagonal_cost(self.mod, self.diagonal))
        return [
            f"    static constexpr bool kStreams = {str(streams).lower()};",
            f"    static constexpr bool kStreamsEvenly = {str(streamed_axis(self.mod) is not None).lower()};",
            f"    static constexpr bool kHasDiagonal = {str(has_diagonal).lower()};",
            f"    static constexpr int kDiagonalCost = {cost};",
            *self._streamed_row(),
            *self._diagonal_function(),
            *self._score_function(),
            *self._added(),
        ]

    def _added(self) -> list[str]:
        terms = added_terms(self.mod)
        return [
            f"    static constexpr bool kAddsOfDistance = {str(bool(terms)).lower()};",
            f"    static constexpr bool kAddsEvenly = {str(adds_evenly(self.mod)).lower()};",
            *(self._function_of_distance("added", terms) if terms else []),
        ]

    def _streamed_row(self) -> list[str]:
        if self.streamed is None:
            return []
        tensor = self.mod.nodes[self.streamed].data
        last = self.mod.tensors[tensor].n_dims - 1
        return [
            "    FLASH_HOST_DEVICE static auto streamed_row(const Row &row) {",
            f"        return row.w{self.streamed};",
            "    }",
            "    FLASH_HOST_DEVICE static int64_t streamed_stride(const Captured &captured) {",
            f"        return captured.t{tensor}.stride[{last}];",
            "    }",
            *self._streamed_step(tensor),
        ]

    def _streamed_step(self, tensor: int) -> list[str]:
        axis = streamed_axis(self.mod)
        if axis is None:
            return []
        return [
            "    FLASH_HOST_DEVICE static int64_t streamed_step(const Captured &captured) {",
            f"        return captured.t{tensor}.stride[{axis}];",
            "    }",
            *self._streamed_place(tensor, axis),
        ]

    def _streamed_place(self, tensor: int, axis: int) -> list[str]:
        assert self.streamed is not None
        writer = self.writer
        n_dims = self.mod.tensors[tensor].n_dims
        places = [
            f"flash::mods::coordinate(captured.t{tensor}, {i}, {writer._value(arg, Stage.ELEMENT)})"
            for i, arg in enumerate(self.mod.nodes[self.streamed].args[:-1])
            if i != axis
        ]
        return [
            "    static constexpr flash::mods::StreamedTensor kStreamedTensor"
            f"{{{tensor}, {n_dims}, {axis}}};",
            "    FLASH_HOST_DEVICE static flash::mods::OuterPlace streamed_place(const Captured &captured, "
            "const Once &once, const Head &head, int b_index, int h_index) {",
            f"        return flash::mods::outer_place({', '.join(places)});",
            "    }",
        ]

    def _diagonal_function(self) -> list[str]:
        if self.diagonal is None:
            return []
        return self._function_of_distance("diagonal", ((1, self.diagonal),))

    def _function_of_distance(self, name: str, terms: tuple[Term, ...]) -> list[str]:
        """A sum of values of the distance, as a function of it."""
        writer = self.writer
        own = writer.stages
        # What else is of a row or a column is computed here, of any query and key at this distance.
        writer.stages = [stage if stage <= Stage.HEAD else Stage.ELEMENT for stage in own]
        known = {
            place: "distance" if self._ops(place) == ("k", "q") else "-distance"
            for place, node in enumerate(self.mod.nodes)
            if node.op == "sub" and sorted(self._ops(place)) == ["k", "q"]
        }
        writer.divides_shortly = True
        lines = []
        for place in sorted({made for _, term in terms for made in self._made_of(term, known)}):
            text = known.get(place)
            if text is None:
                lines += writer._statement(place, Stage.ELEMENT, "        ")
            else:
                lines.append(f"        const {writer._type(place)} v{place} = {text};")
        values = [(sign, writer._value(place, Stage.ELEMENT)) for sign, place in terms]
        value = " ".join(f"{'+' if sign > 0 else '-'} {text}" for sign, text in values).removeprefix("+ ")
        writer.stages, writer.divides_shortly = own, False
        return [
            f"    FLASH_HOST_DEVICE static float {name}(const Captured &captured, const Once &once, "
            "const Head &head, int b_index, int h_index, int distance) {",
            "        [[maybe_unused]] const int q_index = distance < 0 ? -distance : 0;",
            "        [[maybe_unused]] const int k_index = distance < 0 ? 0 : distance;",
            *lines,
            f"        return {value};",
            "    }",
        ]

    def _ops(self, place: int) -> tuple[str, ...]:
        return tuple(self.mod.nodes[arg].op for arg in self.mod.nodes[place].args)

    def _made_of(self, root: int, known: dict[int, str]) -> list[int]:
        """The nodes of an element that a value is made of, but for those behind what is known."""
        writer = self.writer
        found: set[int] = set()
        waiting = [root]
        while waiting:
            place = waiting.pop()
            if writer.stages[place] is not Stage.ELEMENT or place in found:
                continue
            found.add(place)
            if place not in known:
                waiting.extend(self.mod.nodes[place].args)
        return [place for place in sorted(found) if not writer._inline(place)]

    def _score_function(self) -> list[str]:
        root = self.mod.result("score")
        known = {}
        if self.streamed is not None:
            known[self.streamed] = "ahead.streamed"
        if self.diagonal is not None:
            known[self.diagonal] = "ahead.diagonal"
        if root is None or not known:
            return []
        writer = self.writer
        lines = []
        for place in self._made_of(root, known):
            if place in known:
                lines.append(f"        const float v{place} = {known[place]};")
            else:
                lines += writer._statement(place, Stage.ELEMENT, "        ")
        signature = writer._signature(Stage.ELEMENT, score=True).replace(
            "float given_score", "[[maybe_unused]] const flash::mods::Ahead &ahead, float given_score"
        )
        return [
            f"    FLASH_HOST_DEVICE static float score_ahead({signature}) {{",
            *lines,
            f"        return {writer._value(root, Stage.ELEMENT)};",
            "    }",
        ]
