"""Whose gradients can be measured: a kernel's, the library's choice, and what autograd makes of a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flash_helpers.benchmark.implementations import Implementation, KernelImplementation, Prepared
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import BACKWARD, FORWARD
from flash_helpers.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flash_attention.backward_call import BackwardCall

FORWARD_ONLY = ("fa3",)
"""Peers of which there is no backward pass: the package ``fa3-fwd`` has none."""


@dataclass(frozen=True)
class BackwardKernelImplementation:
    """One configuration's gradients of ``attention``, written to tensors allocated once."""

    kernel: Kernel
    kind: str = "kernel"

    @property
    def name(self) -> str:
        """The kernel's short form."""
        return self.kernel.short_form()

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """As of a forward kernel."""
        return KernelImplementation(self.kernel).unavailable_reason(problem, device)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The backward pass alone: what the forward pass returns is made here."""
        return Prepared(_gradients(problem, q, k, v, self.kernel.config))


@dataclass(frozen=True)
class BackwardImplementation:
    """The library's own choice of a backward kernel."""

    name: str = "attention"
    kind: str = "kernel"

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """None: what no kernel computes raises when it is prepared, with the reasons of all."""
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The same with the kernel that is chosen; one that is not built is compiled."""
        from flash_attention.run.choices import choose

        call = _backward_call(problem, q, k, v)
        name = choose(call.problem, q.device, None).kernel.short_form()
        return Prepared(_gradients(problem, q, k, v, None), ran=lambda: name)


@dataclass(frozen=True)
class AutogradImplementation:
    """The gradients that autograd makes of another implementation's forward pass, which is run once.

    Attributes:
        forward: that implementation.
    """

    forward: Implementation

    @property
    def name(self) -> str:
        """The other's."""
        return self.forward.name

    @property
    def kind(self) -> str:
        """The other's."""
        return self.forward.kind

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """The other's reasons, and that it has no backward pass."""
        if self.name in FORWARD_ONLY:
            return "has no backward pass"
        return self.forward.unavailable_reason(problem, device)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The graph is made once and kept; a call runs the backward pass through it."""
        import torch

        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        prepared = self.forward.prepare(problem, *leaves)
        dout = problem.output_gradient(q.device)
        with prepared.context(), torch.enable_grad():
            out = prepared.call()
        out = out[0] if isinstance(out, tuple) else out

        def call() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return Prepared(call, prepared.context)


def in_direction(implementation: Implementation, direction: str) -> Implementation:
    """What measures a pass of this direction where another measures ``forward``."""
    if direction == FORWARD or isinstance(
        implementation, BackwardKernelImplementation | BackwardImplementation
    ):
        return implementation
    if implementation.name == BackwardImplementation.name:
        return BackwardImplementation()
    return AutogradImplementation(implementation)


def implementation_of(kernel: Kernel) -> Implementation:
    """What measures a kernel of either direction."""
    from flash_helpers.kernels.families import direction_of

    if direction_of(kernel).name == BACKWARD:
        return BackwardKernelImplementation(kernel)
    return KernelImplementation(kernel)


def _backward_call(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> BackwardCall:
    import torch

    from flash_attention import attention
    from flash_attention.backward_call import BackwardCall
    from flash_attention.call import Mask, Scores

    with torch.no_grad():
        out, lse = attention(q, k, v, causal=problem.causal, return_lse=True)
    # What a kernel does not write can't be right by chance.
    grads = (torch.full_like(x, float("nan")) for x in (q, k, v))
    mask, scores = Mask.of(problem.causal, (None, None)), Scores(q.shape[3] ** -0.5)
    dq, dk, dv = grads
    dout = problem.output_gradient(q.device)
    return BackwardCall(q, k, v, out, lse, dout, None, dq, dk, dv, None, mask, scores)


def _gradients(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, config: KernelConfig | None
) -> Callable[[], Any]:
    """A function that computes (dq, dk, dv) again and again."""
    from flash_attention.devices import backend, backward_backend
    from flash_attention.run.choices import choose

    call = _backward_call(problem, q, k, v)
    choice = choose(call.problem, q.device, config)
    run_backward = backend(backward_backend(q.device.type)).run_backward

    def compute() -> tuple[Tensor | None, ...]:
        run_backward(call, choice)
        return call.dq, call.dk, call.dv

    return compute
