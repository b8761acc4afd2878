"""A mod as C++: a struct whose functions compute each value as seldom as what it depends on allows.

Nothing but numbers, operations and numbered names goes into the text: none of it is the user's.

    struct NAME {
        static constexpr bool kChangesScores, kHidesKeys;  // whether there are score and visible
        static constexpr ModSignature kSignature;          // digest, how many numbers and tensors
        static constexpr bool kLoadsElements;              // whether a tensor is read for each score
        static constexpr bool kDrops;                      // whether weights are dropped: Captured::dropout
        struct Captured { … };   // numbers, and pointers, sizes and strides of tensors, for the kernel
        static Captured captured(arguments);               // … made of a launch's ModArguments
        struct Once { … };       // what depends on them alone
        struct Head { … };       // … on the batch item or the head
        struct Row { … };        // … on the query, not on the key
        struct Column { … };     // … on the key, not on the query
        static Once once(captured);
        static Head head(captured, once, b, h);
        static Row row(captured, once, head, b, h, q);
        static Column column(captured, once, head, b, h, k);
        static float score(captured, once, head, row, column, score, b, h, q, k);   // and each other result
        …                        // what is found before the scores are there: cpp_ahead
        …                        // what the mask tells of tiles: cpp_tiles
    };
"""

from __future__ import annotations

import math
import struct

from flash_helpers.mods.ahead import row_loads
from flash_helpers.mods.cpp_ahead import AheadWriter
from flash_helpers.mods.cpp_gradients import gradient_lines
from flash_helpers.mods.cpp_tiles import tile_lines
from flash_helpers.mods.intervals import intervals
from flash_helpers.mods.mod import Mod, Node
from flash_helpers.mods.operations import COMPARISONS, INDICES, REDUCTIONS, Kind
from flash_helpers.mods.stages import Stage, loops, needed, stages

HEADER = "common/mod_values.cuh"
_STRUCTS = {Stage.ONCE: "Once", Stage.HEAD: "Head", Stage.ROW: "Row", Stage.COLUMN: "Column"}
_KNOWS = {  # the stages whose values each stage can read, and its indices
    Stage.ONCE: ((), ()),
    Stage.HEAD: ((Stage.ONCE,), ("b", "h")),
    Stage.ROW: ((Stage.ONCE, Stage.HEAD), ("b", "h", "q")),
    Stage.COLUMN: ((Stage.ONCE, Stage.HEAD), ("b", "h", "k")),
    Stage.ELEMENT: (tuple(_STRUCTS), INDICES),
}
_LEAVES = (*INDICES, "score", "constant", "number", "loop")
_VARIABLES = {**{name: f"{name}_index" for name in INDICES}, "score": "given_score", "loop": "step"}


def cpp_source(mod: Mod, name: str | None = None) -> str:
    """The struct of a mod, as text for a unit that includes ``HEADER``, as launchers that take mods do.

    Args:
        mod: the mod.
        name: of the struct; None: ``mod.id``.
    """
    return _Writer(mod).struct(mod.id if name is None else name)


def float_literal(value: float) -> str:
    """A float32 as C++ writes it, exactly."""
    if math.isnan(value):
        return "flash::mods::kNaN"
    try:
        (value,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        value = math.copysign(math.inf, value)
    if math.isinf(value):
        return "flash::mods::kInfinity" if value > 0 else "(-flash::mods::kInfinity)"
    return f"({value.hex()}f)" if math.copysign(1.0, value) < 0 else f"{value.hex()}f"


def _single(value: float) -> float:
    """A real number as the float32 that a kernel computes with."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _has_inverse(value: float) -> bool:
    """Whether ``flash::mods::divided`` may divide by a constant: not by powers of 2, which a product does
    anyway, nor by what is near the ends of the range or has ones alone behind the first bit."""
    if not 2.0**-100 < abs(value) < 2.0**100:
        return False
    mantissa, _ = math.frexp(_single(value))
    return abs(mantissa) not in (0.5, 1 - 2.0**-24)


class _Writer:
    def __init__(self, mod: Mod) -> None:
        self.mod = mod
        self.stages, self.loops = stages(mod), loops(mod)
        self.bounds = intervals(mod)
        self.used = needed(mod, *(name for name, _ in mod.results))
        self.kept = self._kept()
        # Where values are computed together: beside each score, the branches of a division keep ptxas from
        # computing several at once, for which there are no registers.
        self.divides_shortly = False
        self.rows = {i: stage for i, stage in row_loads(mod).items() if self.used[i]}

    # ------------------------------------------------------------------ the struct
    def struct(self, name: str) -> str:
        captured = [f"        {member};" for member, _ in self._captured()]
        lines = [f"struct {name} {{"]
        for flag, result in (("kChangesScores", "score"), ("kHidesKeys", "visible")):
            has = "true" if self.mod.result(result) is not None else "false"
            lines.append(f"    static constexpr bool {flag} = {has};")
        mod = self.mod
        lines.append(
            "    static constexpr flash::ModSignature kSignature"
            f"{{0x{mod.digest:016x}u, {len(mod.numbers)}, {len(mod.tensors)}}};"
        )
        loads = any(
            node.op == "load" and self.used[i] and self.stages[i] is Stage.ELEMENT
            for i, node in enumerate(mod.nodes)
        )
        lines.append(f"    static constexpr bool kLoadsElements = {str(loads).lower()};")
        lines.append(f"    static constexpr bool kDrops = {str(mod.dropped is not None).lower()};")
        lines += ["    struct Captured {", *captured, "    };", *self._captured_function()]
        for stage, title in _STRUCTS.items():
            fields = [f"        {self._type(i)} v{i};" for i in self.kept[stage]]
            fields += [f"        {self._row_type(i)} w{i};" for i in self._rows_of(stage)]
            lines += [f"    struct {title} {{", *fields, "    };"]
        for stage, title in _STRUCTS.items():
            lines += self._stage_function(stage, title)
        for result, place in self.mod.results:
            lines += self._result_function(result, place)
        lines += AheadWriter(self).lines()
        lines += tile_lines(self.mod)
        lines += gradient_lines(mod, self._signature(Stage.ELEMENT, score=True))
        return "\n".join([*lines, "};", ""])

    def _captured(self) -> list[tuple[str, str]]:
        """Each member of what is captured, and its value of a launch's arguments."""
        mod, found = self.mod, []
        for i, number in enumerate(mod.numbers):
            which = "real" if number.kind is Kind.FLOAT else "whole"
            if mod.dropped is None or i != mod.dropped.number:
                found.append((f"{number.cpp} n{i}", f"{number.cpp}(given.numbers[{i}].{which})"))
        for i, tensor in enumerate(mod.tensors):
            kind = f"{tensor.element.cpp}, {tensor.n_dims}"
            if mod.dropped is None or i != mod.dropped.tensor:
                value = f"flash::mods::tensor<{kind}>(given.tensors[{i}])"
                found.append((f"flash::mods::Tensor<{kind}> t{i}", value))
        if mod.dropped is not None:
            given = f"given.numbers[{mod.dropped.number}].real, given.tensors[{mod.dropped.tensor}].data"
            found.append(("flash::Dropout dropout", f"flash::make_dropout({given})"))
        return found

    def _captured_function(self) -> list[str]:
        return [
            "    static Captured captured([[maybe_unused]] const flash::ModArguments &given) {",
            f"        return {{{', '.join(value for _, value in self._captured())}}};",
            "    }",
        ]

    def _kept(self) -> dict[Stage, list[int]]:
        """Of each stage the values that later ones read."""
        read = set()
        for place, node in enumerate(self.mod.nodes):
            if self.used[place]:
                own = self.stages[place]
                inside = self.loops[place] or node.op in REDUCTIONS
                read |= {a for a in node.args if self.stages[a] is not own or inside}
        read |= {place for _, place in self.mod.results}
        # What is within a loop is computed where the loop is.
        for place in range(len(self.mod.nodes) - 1, -1, -1):
            if self.loops[place] and self.used[place]:
                read |= set(self.mod.nodes[place].args)
        return {
            stage: [i for i in sorted(read) if self.stages[i] is stage and not self._inline(i)]
            for stage in _STRUCTS
        }

    def _inline(self, place: int) -> bool:
        return self.mod.nodes[place].op in _LEAVES or self.loops[place]

    def _signature(self, stage: Stage, score: bool = False) -> str:
        before, indices = _KNOWS[stage]
        parts = ["const Captured &captured"]
        parts += [f"const {_STRUCTS[s]} &{_STRUCTS[s].lower()}" for s in before]
        parts += ["float given_score"] * score + [f"int {_VARIABLES[name]}" for name in indices]
        return ", ".join(parts)

    def _stage_function(self, stage: Stage, title: str) -> list[str]:
        places = [
            i for i in range(len(self.mod.nodes))
            if self.used[i] and self.stages[i] is stage and not self._inline(i)
        ]  # fmt: skip
        body = [line for i in places for line in self._statement(i, stage, "        ")]
        names = [f"v{i}" for i in self.kept[stage]]
        for i in self._rows_of(stage):
            names.append(f"w{i}")
            body.append(f"        const {self._row_type(i)} w{i} = {self._row(i, stage)};")
        values = ", ".join(names)
        return [
            f"    FLASH_HOST_DEVICE static {title} {title.lower()}({self._signature(stage)}) {{",
            *body,
            f"        return {title}{{{values}}};",
            "    }",
        ]

    def _result_function(self, result: str, root: int) -> list[str]:
        wanted = needed(self.mod, result)
        places = [
            i for i in range(root + 1)
            if wanted[i] and self.stages[i] is Stage.ELEMENT and not self._inline(i)
        ]  # fmt: skip
        body = [line for i in places for line in self._statement(i, Stage.ELEMENT, "        ")]
        signature = self._signature(Stage.ELEMENT, score=True)
        value = self._value(root, Stage.ELEMENT)
        if self.loops[root]:  # a value for each step of a sum: the caller says which
            signature += ", int step"
            inner = [i for i in range(root + 1) if wanted[i] and self.loops[i] and not self._is_leaf(i)]
            body += [line for i in inner for line in self._statement(i, Stage.ELEMENT, "        ")]
        return [
            f"    FLASH_HOST_DEVICE static {self._type(root)} {result}({signature}) {{",
            *body,
            f"        return {value};",
            "    }",
        ]

    # ------------------------------------------------------------------ rows of tensors
    def _rows_of(self, stage: Stage) -> list[int]:
        """The loads whose row a stage finds."""
        return [i for i, found in self.rows.items() if found is stage]

    def _row_type(self, place: int) -> str:
        return f"flash::mods::RowOf<{self.mod.tensors[self.mod.nodes[place].data].element.cpp}>"

    def _row(self, place: int, stage: Stage) -> str:
        node = self.mod.nodes[place]
        indices = [self._index(arg, self._value(arg, stage)) for arg in node.args[:-1]]
        return f"captured.t{node.data}.row({', '.join(indices)})"

    # ------------------------------------------------------------------ statements
    def _statement(self, place: int, stage: Stage, indent: str) -> list[str]:
        node = self.mod.nodes[place]
        if node.op in REDUCTIONS:
            return self._loop(place, stage, indent)
        return [f"{indent}const {self._type(place)} v{place} = {self._expression(place, stage)};"]

    def _loop(self, place: int, stage: Stage, indent: str) -> list[str]:
        node = self.mod.nodes[place]
        (body,) = node.args
        inside: set[int] = set()
        waiting = [body]
        while waiting:
            i = waiting.pop()
            if self.loops[i] and i not in inside and not self._is_leaf(i):
                inside.add(i)
                waiting.extend(self.mod.nodes[i].args)
        kind, deeper = self._type(place), indent + "    "
        value = self._value(body, stage)
        start, step = {
            "any": ("false", f"v{place} = v{place} | {value};"),
            "all": ("true", f"v{place} = v{place} & {value};"),
            "sum": (f"{kind}(0)", f"v{place} = {self._sum(place, value)};"),
            "largest": (f"{kind}(0)", self._extreme(place, "maximum", value)),
            "smallest": (f"{kind}(0)", self._extreme(place, "minimum", value)),
        }[node.op]
        return [
            f"{indent}{kind} v{place} = {start};",
            f"{indent}for (int step = 0; step < {node.data}; ++step) {{",
            *(line for i in sorted(inside) for line in self._statement(i, stage, deeper)),
            f"{deeper}{step}",
            f"{indent}}}",
        ]

    def _sum(self, place: int, value: str) -> str:
        if self.mod.nodes[place].kind is Kind.INT:
            return f"flash::mods::add(v{place}, int64_t({value}))"
        return f"v{place} + {value}"

    def _extreme(self, place: int, function: str, value: str) -> str:
        kind = self._type(place)
        return f"v{place} = step == 0 ? {kind}({value}) : flash::mods::{function}(v{place}, {kind}({value}));"

    def _is_leaf(self, place: int) -> bool:
        return self.mod.nodes[place].op in _LEAVES

    # ------------------------------------------------------------------ expressions
    def _type(self, place: int) -> str:
        node = self.mod.nodes[place]
        if node.kind is not Kind.INT:
            return "bool" if node.kind is Kind.BOOL else "float"
        if node.op == "number":
            return self.mod.numbers[node.data].cpp
        if node.op == "sum":
            return "int64_t"
        return "int" if self.bounds[place].in_32_bits else "int64_t"

    def _value(self, place: int, stage: Stage) -> str:
        """A value as an operand."""
        node = self.mod.nodes[place]
        if node.op == "constant":
            return _constant(node)
        if node.op == "number":
            return f"captured.n{node.data}"
        if node.op in _VARIABLES:
            return _VARIABLES[node.op]
        own = self.stages[place]
        if self.loops[place] or own is stage:
            return f"v{place}"
        return f"{_STRUCTS[own].lower()}.v{place}"

    def _expression(self, place: int, stage: Stage) -> str:
        node = self.mod.nodes[place]
        values = [self._value(arg, stage) for arg in node.args]
        kinds = [self.mod.nodes[arg].kind for arg in node.args]
        if node.op == "load":
            indices = [self._index(arg, value) for arg, value in zip(node.args, values, strict=True)]
            if place in self.rows:
                row = f"{_STRUCTS[self.rows[place]].lower()}.w{place}"
                return f"captured.t{node.data}.in_row({row}, {indices[-1]})"
            return f"captured.t{node.data}.at({', '.join(indices)})"
        if node.op == "where":
            kind = self._type(place)
            return f"{values[0]} ? {kind}({values[1]}) : {kind}({values[2]})"
        if Kind.INT in kinds and (node.kind is Kind.INT or node.op in COMPARISONS):
            return self._whole(place, values)
        divisor = self.mod.nodes[node.args[1]] if node.op == "divide" else None
        short = self.divides_shortly and divisor is not None and divisor.op == "constant"
        if short and divisor is not None and _has_inverse(divisor.data):
            inverse = float_literal(1.0 / _single(divisor.data))
            return f"flash::mods::divided({values[0]}, {values[1]}, {inverse})"
        if node.op in _SIGNS:
            return f"{values[0]} {_SIGNS[node.op]} {values[1]}"
        if node.op == "not":
            return f"!{values[0]}"
        if node.op == "neg":
            return f"-{values[0]}"
        if node.op == "to_float":
            return f"float({values[0]})"
        if node.op == "to_bool":
            return f"{values[0]} != 0"
        if node.op == "to_int" and kinds[0] is Kind.BOOL:
            return f"int({values[0]})"
        return f"flash::mods::{_FUNCTIONS.get(node.op, node.op)}({', '.join(values)})"

    def _index(self, place: int, value: str) -> str:
        """An index, with what is known of its sign: one below 0 counts from the end."""
        return f"flash::mods::not_negative({value})" if int(self.bounds[place].low) >= 0 else value

    def _whole(self, place: int, values: list[str]) -> str:
        """An operation of whole numbers: of 32 bits where they hold operands and result, else of 64."""
        node = self.mod.nodes[place]
        types = {self._type(arg) for arg in node.args} | {self._type(place)} - {"bool"}
        wide = "int64_t" in types
        kind = "int64_t" if wide else "int"
        operands = [
            value if not wide or self._type(arg) == "int64_t" else f"int64_t({value})"
            for arg, value in zip(node.args, values, strict=True)
        ]
        text = self._short(node, operands, wide)
        if text is None:
            if node.op in ("and", "or", "xor") or node.op in COMPARISONS:
                text = f"{operands[0]} {_SIGNS[node.op]} {operands[1]}"
            elif node.op == "not":
                text = f"~{operands[0]}"
            elif node.op in ("add", "sub", "mul") and not wide:
                text = f"{operands[0]} {_SIGNS[node.op]} {operands[1]}"
            else:
                text = f"flash::mods::{_FUNCTIONS.get(node.op, node.op)}({', '.join(operands)})"
        return text if self._type(place) in ("bool", kind) else f"{self._type(place)}({text})"

    def _short(self, node: Node, operands: list[str], wide: bool) -> str | None:
        """The quick form of a division by a constant or of a shift by one."""
        if len(node.args) != 2:
            return None
        second = self.mod.nodes[node.args[1]]
        if second.op != "constant":
            return None
        by = second.data
        if node.op in ("floor_divide", "remainder") and by > 0:
            if by & (by - 1) == 0:
                divides = node.op == "floor_divide"
                tail = f">> {by.bit_length() - 1}" if divides else f"& {_integer(by - 1)}"
                return f"{operands[0]} {tail}"
            if not wide and int(self.bounds[node.args[0]].low) >= 0:
                sign = "/" if node.op == "floor_divide" else "%"
                return f"int(unsigned({operands[0]}) {sign} {by}u)"
        if node.op == "shift_right" and 0 <= by < (64 if wide else 32):
            return f"{operands[0]} >> {by}"
        return None


def _constant(node: Node) -> str:
    if node.kind is Kind.BOOL:
        return "true" if node.data else "false"
    return float_literal(node.data) if node.kind is Kind.FLOAT else _integer(node.data)


def _integer(value: int) -> str:
    if value == -(2**63):
        return "INT64_MIN"
    if value == -(2**31):  # 2147483648 alone is no int
        return "(-2147483647 - 1)"
    if not -(2**31) < value < 2**31:
        return f"int64_t({value})"
    return f"({value})" if value < 0 else str(value)


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "divide": "/", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
_FUNCTIONS = {
    "abs": "absolute",
    "neg": "negative",
    "to_int": "to_int",
    "pow": "power",
    "round": "round_to_even",
}
