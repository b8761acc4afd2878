"""What can be measured: an implementation makes, for given inputs, a function without arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Prepared:
    """An implementation bound to its inputs.

    Attributes:
        call: computes and returns O, (batch, seq_len, heads, d_head), or a tuple that begins with it.
        context: settings that hold for many calls, entered around them.
        ran: after a call: the short form of the kernel that ran, where the call chose one.
    """

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ran: Callable[[], str] = str


class UnavailableError(Exception):
    """Something can't be measured here, or has no such feature; the message says why."""


def last_kernel_name() -> str:
    """Short form of the kernel that the latest ``attention`` of this library ran; empty: there was none."""
    from flash_attention import last_kernel

    kernel = last_kernel()
    return "" if kernel is None else kernel.short_form()


class Implementation(Protocol):
    """Something that computes attention."""

    @property
    def name(self) -> str:
        """Its id in rows and tables."""

    @property
    def kind(self) -> str:
        """``kernel`` or ``peer``."""

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """Why it can't run this problem here, or None."""

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """Binds the inputs. May compile; raises what the implementation raises."""


@dataclass(frozen=True)
class KernelImplementation:
    """``flash_attention.forward`` with one configuration, writing to an output allocated once."""

    kernel: Kernel
    kind: str = "kernel"

    @property
    def name(self) -> str:
        """The kernel's short form."""
        return self.kernel.short_form()

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """A configuration is made for one dtype, one head size and whole tiles."""
        config = self.kernel.config
        if not problem.fits(config):
            d_head = (
                f"{config.d_head}/{config.d_head_v}" if config.d_head_v != config.d_head else config.d_head
            )
            return f"the configuration is for {config.dtype.name} and d_head {d_head}"
        if device.type == "cuda":
            from flash_attention.backends.cuda import device_facts_of

            if reason := config.infeasible_reason(device_facts_of(device)):
                return reason
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The call allocates nothing."""
        import torch

        from flash_attention import attention, forward

        config = self.kernel.config
        o = torch.full_like(q, float("nan"))  # what a kernel does not write can't be right by chance
        whole_tiles = q.shape[1] % config.B_r == 0 and k.shape[1] % config.B_c == 0
        if whole_tiles and q.shape == k.shape and not problem.causal:
            return Prepared(lambda: forward(config, q, k, v, o))
        return Prepared(lambda: attention(q, k, v, causal=problem.causal, config=config, out=o))

    @classmethod
    def of(cls, config: Any, problem: Problem) -> KernelImplementation:
        """The kernel of ``config`` with the traits that ``problem`` needs."""
        return cls(kernel_of(config, causal=problem.causal))


@dataclass(frozen=True)
class AttentionImplementation:
    """``flash_attention.attention``: the library's own choice of a kernel."""

    name: str = "attention"
    kind: str = "kernel"

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """None: what no kernel computes raises when it is prepared, with the reasons of all."""
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The call as a user writes it, its choice built: a kernel that is not gives way to one that is."""
        import flash_attention
        from flash_attention.call import Mask, problem_of

        if q.is_cuda:
            wanted = problem_of(q, k, v, Mask.of(problem.causal, (None, None)))
            flash_attention.prepare([wanted], q.device)
        return Prepared(
            lambda: flash_attention.attention(q, k, v, causal=problem.causal), ran=last_kernel_name
        )
