"""Making a mod, node by node: kinds are converted, equal nodes are one, constants are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flash_helpers.mods.mod import LEAVES, Mod, Node, Number, TensorType
from flash_helpers.mods.operations import INDICES, OPERATIONS, REDUCTIONS, Kind, wrapped

BOOL, INT, FLOAT = Kind


class TooLargeError(ValueError):
    """A mod would have more nodes than its builder allows."""


class Builder:
    """Nodes under construction. Methods take and give places of nodes.

    Args:
        numbers, tensors: types of what is captured.
        most: how many nodes there may be; None: any number, as of the derivative of what a user wrote.
    """

    def __init__(
        self,
        numbers: Iterable[Number] = (),
        tensors: Iterable[TensorType] = (),
        most: int | None = None,
    ) -> None:
        self.most = most
        self.nodes: list[Node] = []
        self.numbers, self.tensors = list(numbers), list(tensors)
        self._places: dict[Node, int] = {}

    # ------------------------------------------------------------------ leaves
    def leaf(self, name: str) -> int:
        """``score``, an index, or ``loop``."""
        return self._node(Node(name, FLOAT if name == "score" else INT))

    def constant(self, value: bool | int | float) -> int:
        """A number that is part of the mod."""
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        if kind is INT and wrapped(value) != value:  # type: ignore[arg-type]
            raise ValueError(f"{value} has more than 64 bits; the whole numbers of a mod have 64")
        return self._node(Node("constant", kind, (), kind_type(kind)(value)))

    def number(self, slot: int) -> int:
        """A captured number."""
        return self._node(Node("number", self.numbers[slot].kind, (), slot))

    # ------------------------------------------------------------------ operations
    def kind(self, place: int) -> Kind:
        return self.nodes[place].kind

    def convert(self, place: int, kind: Kind) -> int:
        """The same value in another kind; of numbers all but 0 are true."""
        have = self.kind(place)
        if have is kind:
            return place
        return self._computed({BOOL: "to_bool", INT: "to_int", FLOAT: "to_float"}[kind], kind, (place,))

    def apply(self, op: str, *args: int) -> int:
        """An operation. Operands become one kind: the largest of theirs that the operation takes.

        Raises:
            ValueError: the operation takes no such operands.
        """
        operation = OPERATIONS[op]
        common = max(self.kind(arg) for arg in args)
        if op in _OF_BOOLS and common is BOOL:  # as torch adds and multiplies bools
            return self.apply(_OF_BOOLS[op], *args)
        allowed = [kind for kind in operation.kinds if kind >= common]
        if not allowed or (op in ("sub", "neg") and common is BOOL):
            takes = " or ".join(KIND_NAMES[k] for k in operation.kinds)
            raise ValueError(
                f"{operation.sign or op} takes {takes}, and was given "
                f"{' and '.join(KIND_NAMES[self.kind(arg)] for arg in args)}"
            )
        kind = allowed[0]
        args = tuple(self.convert(arg, kind) for arg in args)
        return self._computed(op, kind if operation.result is None else operation.result, args)

    def where(self, condition: int, a: int, b: int) -> int:
        """One of two values."""
        condition = self.convert(condition, BOOL)
        kind = max(self.kind(a), self.kind(b))
        a, b = self.convert(a, kind), self.convert(b, kind)
        chosen = self.nodes[condition]
        if chosen.op == "constant":
            return a if chosen.data else b
        return a if a == b else self._node(Node("where", kind, (condition, a, b)))

    def load(self, slot: int, indices: Iterable[int]) -> int:
        """An element of a captured tensor; see ``intervals`` and ``cpp`` for indices outside of it."""
        args = tuple(indices)
        if len(args) != self.tensors[slot].n_dims:
            raise ValueError(f"{len(args)} indices for a tensor of {self.tensors[slot].n_dims} dimensions")
        if any(self.kind(arg) is not INT for arg in args):
            raise ValueError("an index must be a whole number")
        return self._node(Node("load", self.tensors[slot].element.kind, args, slot))

    def reduce(self, op: str, length: int, body: int) -> int:
        """``any``, ``all``, ``sum``, ``largest`` or ``smallest`` of ``body`` for each value of ``loop``."""
        if self.kind(body) is BOOL:
            op = {"largest": "any", "smallest": "all"}.get(op, op)
        kind = BOOL if op in ("any", "all") else max(INT, self.kind(body))
        return self._node(Node(op, kind, (self.convert(body, kind),), length))

    # ------------------------------------------------------------------ the end
    def finish(self, results: Mapping[str, int], all_captured: bool = False) -> Mod:
        """The mod that computes these values, without what they do not need and in the order of their use.

        ``number_slots`` and ``tensor_slots`` say then which captured values it kept, in its own order; with
        ``all_captured`` they are all, in the order that they had.
        """
        order: dict[int, int] = {}
        nodes: list[Node] = []
        slots: dict[str, dict[int, int]] = {"number": {}, "load": {}}
        if all_captured:
            slots = {
                "number": {i: i for i in range(len(self.numbers))},
                "load": {i: i for i in range(len(self.tensors))},
            }
        for root in results.values():
            waiting = [root]
            while waiting:
                place = waiting[-1]
                missing = [arg for arg in self.nodes[place].args if arg not in order]
                if place in order or not missing:
                    waiting.pop()
                    if place not in order:
                        node = self.nodes[place]
                        data = node.data
                        if node.op in slots:
                            data = slots[node.op].setdefault(data, len(slots[node.op]))
                        order[place] = len(nodes)
                        nodes.append(Node(node.op, node.kind, tuple(order[arg] for arg in node.args), data))
                else:
                    waiting.extend(reversed(missing))
        self.number_slots, self.tensor_slots = list(slots["number"]), list(slots["load"])
        return Mod(
            tuple(nodes),
            tuple((name, order[place]) for name, place in results.items()),
            tuple(self.numbers[slot] for slot in self.number_slots),
            tuple(self.tensors[slot] for slot in self.tensor_slots),
        )

    def copy(self, mod: Mod, score: int | None = None) -> list[int]:
        """Takes over all nodes of a mod with the same captured values; gives their places here.

        Args:
            mod: the mod.
            score: what stands in the place of the score that it is given; None: a score that is given.
        """
        places: list[int] = []
        for node in mod.nodes:
            if node.op == "score" and score is not None:
                places.append(score)
                continue
            places.append(
                self._node(Node(node.op, node.kind, tuple(places[a] for a in node.args), node.data))
            )
        return places

    def _computed(self, op: str, kind: Kind, args: tuple[int, ...]) -> int:
        operands = [self.nodes[arg] for arg in args]
        if all(operand.op == "constant" for operand in operands):
            return self.constant(kind_type(kind)(OPERATIONS[op].value(*(x.data for x in operands))))
        if (same := self._unchanged(op, args, operands)) is not None:
            return same
        return self._node(Node(op, kind, args))

    def _unchanged(self, op: str, args: tuple[int, ...], operands: list[Node]) -> int | None:
        """The operand that the operation does not change, by rules that hold for NaN and infinity, too."""
        if len(args) != 2:
            return None
        for this, other in ((0, 1), (1, 0)):
            data = operands[this].data
            if operands[this].op != "constant" or (this == 0 and op not in _COMMUTATIVE):
                continue
            neutral = _NEUTRAL.get((op, operands[this].kind))
            if neutral is not None and repr(data) == repr(neutral):
                return args[other]
            if op in ("and", "or") and operands[this].kind is BOOL:
                return args[this]  # False & x, True | x
        return args[0] if args[0] == args[1] and op in ("and", "or", "minimum", "maximum") else None

    def _node(self, node: Node) -> int:
        place = self._places.get(node)
        if place is None:
            if self.most is not None and len(self.nodes) >= self.most:
                raise TooLargeError(f"more than {self.most} operations")
            place = self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return place


_OF_BOOLS = {"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}
_COMMUTATIVE = ("add", "mul", "and", "or", "xor")
_NEUTRAL: dict[tuple[str, Kind], Any] = {
    ("add", INT): 0, ("sub", INT): 0, ("mul", INT): 1, ("floor_divide", INT): 1,
    ("add", FLOAT): -0.0, ("sub", FLOAT): 0.0, ("mul", FLOAT): 1.0, ("divide", FLOAT): 1.0,
    ("and", BOOL): True, ("or", BOOL): False, ("xor", BOOL): False,
    ("shift_left", INT): 0, ("shift_right", INT): 0,
}  # fmt: skip
KIND_NAMES = {BOOL: "a bool", INT: "a whole number", FLOAT: "a real number"}


def kind_type(kind: Kind) -> type:
    """The Python type of values of a kind."""
    return (bool, int, float)[kind]


assert set(INDICES) < set(LEAVES)
assert not set(OPERATIONS) & set(REDUCTIONS)
