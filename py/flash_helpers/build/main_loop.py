"""The loop of a kernel that runs: the one over tiles of K and V without a mask."""

from __future__ import annotations

from collections.abc import Sequence

from flash_helpers.build.control_flow import ControlFlow, NaturalLoop
from flash_helpers.build.sass import Instruction

MMA = ("HMMA", "HGMMA")
JUMPS = ("BRA", "NOP", "YIELD")  # opcodes of a block that does nothing but jump back


def main_loop(instructions: Sequence[Instruction], n_products: int | None = None) -> list[Instruction]:
    """The innermost natural loop that holds matrix instructions; empty when there is none.

    Of several with equally few products (one with a mask, one without) it is the one with the shortest hot
    path: the one without extra work. A loop that also has the softmax's exponentials is preferred to one
    without them. Where there are warpgroup instructions, only those count as matrix instructions: other
    products are of a rare path. What a wait does when it is tried again is left out where it stands apart.

    Args:
        instructions: one function.
        n_products: how many matrix instructions the loop has, see ``products_per_block``; None: any number.
    """
    products = ("HGMMA",) if any(i.name == "HGMMA" for i in instructions) else MMA
    flow = ControlFlow(instructions)
    loops = flow.natural_loops()
    candidates: list[tuple[int, list[Instruction]]] = []  # with their number of products
    for loop in loops:
        body = _without_waits(flow, loop, loops)
        found = sum(i.name in products for i in body)
        if found if n_products is None else found == n_products:
            candidates.append((found, body))
    softmax = [c for c in candidates if any(i.opcode.startswith("MUFU.EX2") for i in c[1])]
    candidates = softmax or candidates
    fewest = min((found for found, _ in candidates), default=0)
    innermost = [body for found, body in candidates if found == fewest]
    return min(innermost, key=lambda body: len(hot_path(body)), default=[])


def hot_path(loop: Sequence[Instruction]) -> list[Instruction]:
    """A loop of warpgroup products without the block that handles growth of the softmax reference.

    Hardly any tile enters it. It is the longest stretch that a forward branch leaps and that loads matrices
    from shared memory, which the loop has no other need for. Other loops are returned as they are.
    """
    skipped: tuple[int, int] = (0, 0)
    if any(i.name == "HGMMA" for i in loop):
        for branch in loop:
            if branch.target is None or not branch.address < branch.target <= loop[-1].address:
                continue
            names = {i.name for i in loop if branch.address < i.address < branch.target}
            longer = branch.target - branch.address > skipped[1] - skipped[0]
            if "LDSM" in names and "HGMMA" not in names and longer:
                skipped = (branch.address, branch.target)
    return [i for i in loop if not skipped[0] < i.address < skipped[1]]


def _without_waits(flow: ControlFlow, loop: NaturalLoop, loops: Sequence[NaturalLoop]) -> list[Instruction]:
    """A loop's instructions without the waits that are tried again apart from it.

    Such a wait is an inner loop without products. The way around it leaves out nothing else but jumps: else
    it would leave out work as well, as where new tiles are loaded only while there are some.
    """
    left_out: frozenset[int] = frozenset()
    whole = flow.cycle(loop, left_out)
    for inner in loops:
        if inner.header == loop.header or not inner.blocks < loop.blocks:
            continue
        if any(i.name in MMA for i in flow.instructions(inner.blocks)):
            continue
        around = flow.cycle(loop, left_out | inner.blocks)
        lost = whole - around - inner.blocks
        if loop.header in inner.blocks or any(i.name not in JUMPS for i in flow.instructions(lost)):
            continue
        whole, left_out = around, left_out | inner.blocks
    return flow.instructions(whole)
