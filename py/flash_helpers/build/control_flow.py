"""The loops of machine code: basic blocks, dominators, back edges.

A block *dominates* another one that can't be reached without it. A branch back to a block that dominates it
closes a *natural loop*: that block, the header, and everything that reaches the branch without passing the
header. A branch back that lands anywhere else closes none, such as the end of a block of retries that the
compiler has put behind the function's last instruction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flash_helpers.build.sass import ENDS, Instruction


@dataclass(frozen=True)
class NaturalLoop:
    """One loop of a function.

    Attributes:
        header: number of the block that is entered first.
        blocks: numbers of all blocks, the header among them.
    """

    header: int
    blocks: frozenset[int]


class ControlFlow:
    """The basic blocks of one function, numbered by address, and who follows whom.

    Args:
        instructions: the function's, by address.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.blocks = _blocks(instructions)
        starts = [block[0].address for block in self.blocks]
        self.successors = [
            _successors(number, block, starts, len(self.blocks)) for number, block in enumerate(self.blocks)
        ]

    @cached_property
    def dominators(self) -> list[int | None]:
        """The immediate dominator of each block; its own number for the entry, None: never reached.

        Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm (2001).
        """
        if not self.blocks:
            return []
        order = self._reverse_postorder()
        place = {block: number for number, block in enumerate(order)}
        predecessors = self._predecessors()
        found: list[int | None] = [None] * len(self.blocks)
        found[order[0]] = order[0]
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                ready = [p for p in predecessors[block] if found[p] is not None]
                new = ready[0]
                for other in ready[1:]:
                    new = _meet(new, other, found, place)
                if found[block] != new:
                    found[block] = new
                    changed = True
        return found

    def natural_loops(self) -> list[NaturalLoop]:
        """All natural loops, by header; those with the same header are one."""
        predecessors = self._predecessors()
        bodies: dict[int, set[int]] = {}
        for block, after in enumerate(self.successors):
            for header in after:
                if self.dominates(header, block):
                    body = bodies.setdefault(header, {header})
                    _add_all_that_reach(block, body, predecessors)
        return [NaturalLoop(header, frozenset(bodies[header])) for header in sorted(bodies)]

    def dominates(self, one: int, other: int) -> bool:
        """Whether every way to block ``other`` passes block ``one``; False where no way leads there."""
        if self.dominators[other] is None:
            return False
        while other != one:
            above = self.dominators[other]
            if above is None or above == other:
                return False
            other = above
        return True

    def cycle(self, loop: NaturalLoop, without: frozenset[int]) -> frozenset[int]:
        """The blocks of a loop that lie on a way from its header back to it that enters none of ``without``.

        The header alone where there is no such way.
        """
        allowed = loop.blocks - without | {loop.header}
        forward = _reached([loop.header], self.successors, allowed)
        predecessors = self._predecessors()
        latches = [block for block in forward if loop.header in self.successors[block]]
        if not latches:
            return frozenset({loop.header})
        return forward & _reached(latches, predecessors, allowed, stop=loop.header)

    def instructions(self, blocks: frozenset[int]) -> list[Instruction]:
        """The instructions of some blocks, by address."""
        return [instruction for number in sorted(blocks) for instruction in self.blocks[number]]

    def _predecessors(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.blocks]
        for block, after in enumerate(self.successors):
            for other in after:
                before[other].append(block)
        return before

    def _reverse_postorder(self) -> list[int]:
        """The blocks that are reached from the entry, each before what follows it but for back edges."""
        seen, order = {0}, []
        stack = [(0, iter(self.successors[0]))]
        while stack:
            block, rest = stack[-1]
            for after in rest:
                if after not in seen:
                    seen.add(after)
                    stack.append((after, iter(self.successors[after])))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    targets = {i.target for i in instructions if i.target is not None}
    blocks: list[list[Instruction]] = []
    ended = True
    for instruction in instructions:
        if ended or instruction.address in targets:
            blocks.append([])
        blocks[-1].append(instruction)
        ended = instruction.target is not None or instruction.name in ENDS
    return blocks


def _successors(
    number: int, block: Sequence[Instruction], starts: Sequence[int], n_blocks: int
) -> tuple[int, ...]:
    last = block[-1]
    after = []
    if not last.always and number + 1 < n_blocks:
        after.append(number + 1)
    if last.target is not None:
        place = bisect_right(starts, last.target) - 1
        if place >= 0 and starts[place] == last.target:  # else it leaves the function
            after.append(place)
    return tuple(dict.fromkeys(after))


def _meet(one: int, other: int, dominators: Sequence[int | None], place: dict[int, int]) -> int:
    """The nearest block that dominates both."""
    while one != other:
        while place[one] > place[other]:
            above = dominators[one]
            assert above is not None
            one = above
        while place[other] > place[one]:
            above = dominators[other]
            assert above is not None
            other = above
    return one


def _add_all_that_reach(block: int, body: set[int], predecessors: Sequence[Sequence[int]]) -> None:
    stack = [block]
    while stack:
        current = stack.pop()
        if current not in body:
            body.add(current)
            stack.extend(predecessors[current])


def _reached(
    starts: Sequence[int], edges: Sequence[Sequence[int]], allowed: frozenset[int], stop: int | None = None
) -> frozenset[int]:
    """Blocks among ``allowed`` that are reached from ``starts``; ways end at ``stop``."""
    seen: set[int] = set()
    stack = [start for start in starts if start in allowed]
    while stack:
        block = stack.pop()
        if block in seen:
            continue
        seen.add(block)
        if block != stop:
            stack.extend(other for other in edges[block] if other in allowed)
    return frozenset(seen)
