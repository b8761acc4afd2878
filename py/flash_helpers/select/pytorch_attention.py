"""PyTorch's own attention on the CPU, as what runs in place of a kernel of this library."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.kernel import BackwardKernel, ForwardKernel

NAME = "PyTorch attention on the CPU"


@dataclass(frozen=True, order=True)
class PyTorchAttention(ForwardKernel):
    """PyTorch's own fused attention, in the place of a kernel whose steps the CPU backend would take.

    It is equal to no ``ForwardKernel``: ``config`` and ``traits`` are those of the steps that are taken for
    batch items in which a score is not finite.
    """

    __hash__ = ForwardKernel.__hash__

    def short_form(self) -> str:
        """A name, not one that can be parsed."""
        return NAME


@dataclass(frozen=True, order=True)
class PyTorchAttentionBackward(BackwardKernel):
    """The same of gradients: PyTorch's own fused backward pass, in float32."""

    __hash__ = BackwardKernel.__hash__

    def short_form(self) -> str:
        """A name, not one that can be parsed."""
        return f"{NAME}, backward"
