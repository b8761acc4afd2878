"""``score_mod`` and ``mask_mod`` of a sequence whose rows are spread: a tile's places as positions.

A kernel counts the queries and keys of its tile from 0, and the user's functions count positions of the
sequence. Within a tile these are ``first + step * place``, and heads are moved likewise. So the functions are
recorded once, with a few numbers more that are arguments of a launch: all tiles run one kernel, or two, and
both passes compute what was captured when the call was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flash_attention.checks.options import given
from flash_attention.checks.tensors import check_tensors
from flash_attention.distributed import agreement
from flash_attention.distributed.tiles import Tile
from flash_attention.mods.block_mask import is_block_mask
from flash_attention.mods.tracing import Traced, trace

Function = Callable[..., Any]
_STANDS_FOR = 1_000_003  # numbers from here on, that no function captures, stand for those of a tile


@dataclass(frozen=True, eq=False)
class Functions:
    """What the user's functions do, in positions of the sequence.

    Attributes:
        score_mod, mask_mod: as the caller gave them; None: there is none.
        plain: both, recorded.
        first_head: the query head of the call that the first one of the tensors is.
    """

    score_mod: Function | None
    mask_mod: Function | None
    plain: Traced
    first_head: int = 0
    _moved: dict[bool, tuple[Traced, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, score_mod: Function | None, mask_mod: Function | None, q: Tensor) -> Functions | None:
        """Both, recorded once; None: there is none.

        Raises:
            ModError, TypeError: a function cannot be recorded, or is none.
            NotImplementedError: a ``BlockMask``, or a captured tensor whose gradient is wanted.
        """
        if score_mod is None and mask_mod is None:
            return None
        if is_block_mask(mask_mod):
            raise NotImplementedError(
                "mask_mod is a BlockMask, which lists blocks of the whole sequence, and ranks have parts: "
                "pass its mask_mod"
            )
        plain = trace(score_mod, mask_mod, q.device)
        check_tensors({f"the captured tensor number {i}": x for i, x in enumerate(plain.tensors)})
        learnt = [i for i, x in enumerate(plain.tensors) if x.requires_grad]
        if learnt:
            raise NotImplementedError(
                f"the captured tensor number {learnt[0]}, of shape {tuple(plain.tensors[learnt[0]].shape)}, "
                "requires a gradient; context parallelism computes none of captured tensors: capture "
                "x.detach()"
            )
        found = cls(score_mod, mask_mod, plain)
        for strided in (False, True):  # now: what is captured may change before the backward pass
            found._moved[strided] = found._recorded(strided, q)
        return found

    def described(self) -> str:
        """What ranks compare: the functions, the numbers that they capture, and the sizes of tensors."""
        tensors = [(str(x.dtype), tuple(x.shape)) for x in self.plain.tensors]
        return f"{self.plain.mod.id}, number {agreement.digest(repr((self.plain.numbers, tensors)))}"

    def at(self, tile: Tile) -> Traced:
        """What they do to the places of a tile."""
        assert tile.positions is not None
        q, k = tile.positions
        steps = [r.step if len(r) > 1 else 1 for r in (q, k)]
        head = self.first_head + (tile.heads[0] if tile.heads else 0)
        moved, stand_ins = self._moved[steps != [1, 1]]
        values: dict[int | float, int | float] = dict(
            zip(stand_ins, (q[0], k[0], head, *steps), strict=False)
        )
        return replace(moved, numbers=tuple(values.get(x, x) for x in moved.numbers))

    def _recorded(self, strided: bool, q: Tensor) -> tuple[Traced, tuple[int, ...]]:
        """The functions behind a change of places, and the numbers that stand for a tile's."""
        taken = set(self.plain.numbers)
        free = (x for x in range(_STANDS_FOR, _STANDS_FOR + 5 + len(taken)) if x not in taken)
        stand_ins = tuple(next(free) for _ in range(5))
        score_mod, mask_mod = (
            None if f is None else _behind(f, stand_ins, strided) for f in (self.score_mod, self.mask_mod)
        )
        return trace(score_mod, mask_mod, q.device), stand_ins


def _behind(function: Function, stand_ins: tuple[int, ...], strided: bool) -> Function:
    first_q, first_k, first_h, step_q, step_k = stand_ins
    if strided:

        def moved(*arguments: Any) -> Any:
            *score, b, h, q, k = arguments
            return function(*score, b, h + first_h, q * step_q + first_q, k * step_k + first_k)

    else:

        def moved(*arguments: Any) -> Any:
            *score, b, h, q, k = arguments
            return function(*score, b, h + first_h, q + first_q, k + first_k)

    return moved


def check_function(name: str, function: object) -> None:
    """TypeError: no function."""
    if function is not None and not callable(function) and not is_block_mask(function):
        raise TypeError(f"{name} is {given(function)}; it must be a function or None")
