"""Calls of ``attention`` that run no kernel: the one rule, and what is said of such a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.kernels.problem import AttentionProblem

NEEDLESS = "the call needs no kernel"


@dataclass(frozen=True)
class NoKernel:
    """In the place of a ``Choice``, with its words: nothing has to be computed, and results are filled.

    Attributes:
        reason: why.
        gradients: the same of the backward pass, where gradients are wanted; None: else.
        kernel, wanted, rejected, numeric_class, fused: as of a ``Choice``; there is none of these.
    """

    reason: str
    gradients: NoKernel | None = None
    kernel: ClassVar[None] = None
    wanted: ClassVar[None] = None
    rejected: ClassVar[tuple[()]] = ()
    numeric_class: ClassVar[None] = None
    fused: ClassVar[bool] = False

    def __str__(self) -> str:
        lines = [f"no kernel\n  because {self.reason}"]
        if self.gradients is not None:
            lines.append(f"gradients by {self.gradients}")
        return "\n".join(lines)


def no_kernel(problem: AttentionProblem) -> NoKernel | None:
    """What ``attention`` does with a problem of either direction that needs no kernel; None: it runs one.

    Sizes and limits decide: counts that are all 0 stand in tensors, which a kernel reads. Packed queries with
    packed keys take one wherever there is a row, since it finds the rows of no sequence.
    """
    sizes = {"batch items": problem.batch, "queries": problem.seq_len_q, "query heads": problem.n_heads}
    packed = problem.varlen and not problem.cached
    if not packed:
        sizes["keys"] = problem.seq_len_k
    for name, size in sizes.items():
        if not size:
            return NoKernel(f"{NEEDLESS}: it has no {name}")
    if problem.sees_nothing and not packed:
        return NoKernel(f"{NEEDLESS}: its mask hides every key from every query")
    return None
