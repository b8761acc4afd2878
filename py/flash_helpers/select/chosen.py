"""A choice: the kernel that runs a problem, with the reasons for it and against the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import head_sizes
from flash_helpers.select.pytorch_attention import PyTorchAttention, PyTorchAttentionBackward


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, and why not."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        kernel: the kernel.
        reason: why this one.
        rejected: all other candidates; those that could have run come first, the nearest one first, and those
            for other types or head sizes last. Empty where they were not asked for.
        n_splits: parts that the keys are cut into; 1 unless the kernel has the trait ``split``.
        problem: what the kernel computes, where a single query's heads have become rows, hidden keys are left
            out or the device has no more SMs than the call may use; None: the problem as it was given.
        slots: of a planned kernel, thread blocks that run at a time, by which the device cuts keys into
            parts; 0: it does not.
        wanted: the kernel that would run if it were built; None: it is the one that runs.
        gradients: of a forward pass whose gradients are wanted: what computes these; None: else.
        numeric_class: with ``numerics="invariant"``: what decides the bits of a row; None: else.
    """

    kernel: Kernel
    reason: str
    rejected: tuple[Rejected, ...] = ()
    n_splits: int = 1
    problem: AttentionProblem | None = None
    wanted: Kernel | None = None
    slots: int = 0
    gradients: Choice | None = None
    numeric_class: NumericClass | None = None

    @property
    def fused(self) -> bool:
        """On the CPU: PyTorch's own fused attention runs, or its backward pass, where scores are finite."""
        return isinstance(self.kernel, PyTorchAttention | PyTorchAttentionBackward)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the kernel has no feature but, perhaps, a causal mask. Asked by every call."""
        traits = self.kernel.traits
        return bool(traits == type(traits)(causal=traits.causal))

    @cached_property
    def head_sizes(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and O, of the kernel. Asked by every call."""
        return head_sizes(self.kernel.config)

    def __str__(self) -> str:
        lines = [f"{self.kernel.short_form()}\n  because {self.reason}"]
        if self.numeric_class is not None:
            lines.append(f"  numeric class: {self.numeric_class}")
        if self.kernel.mod is not None:
            from flash_helpers.mods.text import explained

            lines += [f"  {line}" if line else "" for line in explained(self.kernel.mod).splitlines()]
        lines += [f"not {r.kernel.short_form()}\n  because {r.reason}" for r in self.rejected]
        if self.gradients is not None:
            lines.append(f"gradients by {self.gradients}")
        return "\n".join(lines)
