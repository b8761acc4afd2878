"""What a generated mod tells of tiles: bounds of its mask over a tile, as C++ (``common/mod_ranges.cuh``).

static constexpr bool kBoundsTell;    // the bounds can tell that a tile is empty or full
static constexpr bool kBoundsDecide;  // they tell it of all tiles but a few at the edge
static flash::mods::Truth tile(captured, batch, head, first_q, last_q, first_k, last_k);
"""

from __future__ import annotations

from flash_helpers.mods.intervals import FAR, Interval, intervals
from flash_helpers.mods.mask_inputs import MASK, needs_bits
from flash_helpers.mods.mod import Mod, Node
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.stages import loops, needed

_WHOLE = {
    "add": "add", "sub": "sub", "mul": "mul", "neg": "negative", "abs": "absolute", "minimum": "minimum",
    "maximum": "maximum",
}  # fmt: skip
_COMPARED = {"lt": "less", "le": "at_most", "eq": "equal"}
_LOGIC = {"and": "both", "or": "either", "xor": "differing", "not": "neither"}
_INDICES = {
    "b": "{batch_index, batch_index}",
    "h": "{head_index, head_index}",
    "q": "{first_q, last_q}",
    "k": "{first_k, last_k}",
}
_SIGNATURE = (
    "[[maybe_unused]] const Captured &captured, [[maybe_unused]] int batch_index, "
    "[[maybe_unused]] int head_index, [[maybe_unused]] int first_q, [[maybe_unused]] int last_q, "
    "[[maybe_unused]] int first_k, [[maybe_unused]] int last_k"
)
UNDECIDED = "flash::mods::Truth{false, true}"


def tile_lines(mod: Mod) -> list[str]:
    """The members of the struct of a mod; of one without a mask, that there is nothing to tell."""
    writer = _Bounds(mod)
    body, result = writer.body()
    flags = {
        "kBoundsTell": result != UNDECIDED,
        "kBoundsDecide": mod.result(MASK) is not None and not needs_bits(mod),
    }
    return [
        *(f"    static constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()),
        f"    FLASH_HOST_DEVICE static flash::mods::Truth tile({_SIGNATURE}) {{",
        *body,
        f"        return {result};",
        "    }",
    ]


class _Bounds:
    """Writes the bounds of nodes; those of which nothing is known at run time get none."""

    def __init__(self, mod: Mod) -> None:
        self.mod = mod
        self.everywhere = intervals(mod)
        self.loops = loops(mod)
        self.known: set[int] = set()  # nodes whose bounds are a variable

    def body(self) -> tuple[list[str], str]:
        root = self.mod.result(MASK)
        if root is None:
            return [], UNDECIDED
        lines = []
        wanted = needed(self.mod, MASK)
        for place, node in enumerate(self.mod.nodes[: root + 1]):
            if not wanted[place] or node.kind is Kind.FLOAT or self.loops[place]:
                continue
            text = self._of(place, node)
            if text is not None:
                self.known.add(place)
                lines.append(f"        [[maybe_unused]] const {self._type(place)} r{place}{text};")
        return lines, self._operand(root)

    # ------------------------------------------------------------------ operands
    def _type(self, place: int) -> str:
        if self.mod.nodes[place].kind is Kind.BOOL:
            return "flash::mods::Truth"
        return f"flash::mods::Range<{'int64_t' if self._wide(place) else 'int'}>"

    def _wide(self, place: int) -> bool:
        return not _within(self.everywhere[place], 2**31)

    def _operand(self, place: int) -> str:
        if place in self.known:
            return f"r{place}"
        if self.mod.nodes[place].kind is Kind.BOOL:
            return UNDECIDED
        bounds = self.everywhere[place]  # those that hold everywhere
        kind = self._type(place)
        low, high = (f"int64_t({int(x)})" if self._wide(place) else f"{int(x)}" for x in bounds)
        return f"{kind}{{{low}, {high}}}".replace("-2147483648", "(-2147483647 - 1)")

    def _bounded(self, place: int) -> bool:
        """Whether sums and products with the node's bounds stay within 64 bits."""
        return place in self.known or _within(self.everywhere[place], FAR)

    def _operands(self, node: Node, wide: bool) -> list[str]:
        texts = []
        for arg in node.args:
            text = self._operand(arg)
            if self.mod.nodes[arg].kind is Kind.INT and wide and not self._wide(arg):
                text = f"flash::mods::wide({text})"
            texts.append(text)
        return texts

    # ------------------------------------------------------------------ nodes
    def _of(self, place: int, node: Node) -> str | None:
        """The initializer of a node's bounds; None: they are those that hold everywhere."""
        if node.op in _INDICES:
            return _INDICES[node.op]
        if node.op == "constant":
            if node.kind is Kind.BOOL:
                return f"{{{str(node.data).lower()}, {str(node.data).lower()}}}"
            return f"{{{node.data}, {node.data}}}" if abs(node.data) < 2**31 else None
        if node.op == "number":
            name = f"captured.n{node.data}"
            return f"{{{name}, {name}}}" if _within(self.everywhere[place], FAR) else None
        if not any(arg in self.known for arg in node.args):
            return None
        if any(self.mod.nodes[arg].kind is Kind.FLOAT for arg in node.args if node.op != "where"):
            return None
        return self._operation(place, node)

    def _operation(self, place: int, node: Node) -> str | None:
        whole = [arg for arg in node.args if self.mod.nodes[arg].kind is Kind.INT]
        if not all(self._bounded(arg) for arg in whole):
            return None
        if node.kind is Kind.INT and not _within(self.everywhere[place], FAR):
            return None
        wide = any(self._wide(arg) for arg in whole) or (node.kind is Kind.INT and self._wide(place))
        args = self._operands(node, wide)
        text: str | None = None
        if node.op in _LOGIC and node.kind is Kind.BOOL:
            text = f"flash::mods::{_LOGIC[node.op]}({', '.join(args)})"
        elif node.op in _COMPARED and whole:
            text = f"flash::mods::{_COMPARED[node.op]}({', '.join(args)})"
        elif node.op == "ne" and whole:
            text = f"flash::mods::neither(flash::mods::equal({', '.join(args)}))"
        elif node.op in ("eq", "ne"):
            differing = f"flash::mods::differing({', '.join(args)})"
            text = differing if node.op == "ne" else f"flash::mods::neither({differing})"
        elif node.op == "where":
            text = f"flash::mods::chosen({', '.join(args)})"
        elif node.op == "to_int":
            text = f"flash::mods::number({args[0]})"
        elif node.op == "to_bool":
            zero = f"flash::mods::Range<{'int64_t' if wide else 'int'}>{{0, 0}}"
            text = f"flash::mods::neither(flash::mods::equal({args[0]}, {zero}))"
        elif node.op in _WHOLE:
            text = f"flash::mods::{_WHOLE[node.op]}({', '.join(args)})"
        elif node.op in ("floor_divide", "remainder"):
            text = self._divided(node, args, wide)
        if text is None:
            return None
        if node.kind is Kind.INT and wide and not self._wide(place):
            text = f"flash::mods::narrow({text})"
        return f" = {text}"

    def _divided(self, node: Node, args: list[str], wide: bool) -> str | None:
        by = self.mod.nodes[node.args[1]]
        if by.op != "constant" or not 0 < by.data < 2**31:
            return None
        divisor = f"int64_t({by.data})" if wide else str(by.data)
        return f"flash::mods::{'quotient' if node.op == 'floor_divide' else 'rest'}({args[0]}, {divisor})"


def _within(bounds: Interval, limit: int) -> bool:
    return -limit <= int(bounds.low) and int(bounds.high) < limit
