"""What can be measured: an implementation makes, for given inputs, a function without arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_helpers.configs.kernel import ForwardKernel
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.problem import Problem


@dataclass(frozen=True)
class Prepared:
    """An implementation bound to its inputs.

    Attributes:
        call: computes and returns O, (batch, seq_len, heads, d_head).
        context: settings that hold for many calls, entered around them.
    """

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


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

    kernel: ForwardKernel
    kind: str = "kernel"

    @property
    def name(self) -> str:
        """The kernel's short form."""
        return self.kernel.short_form()

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """A configuration is made for one dtype, one head size and whole tiles."""
        config = self.kernel.config
        if config.dtype != problem.dtype:
            return f"the configuration is for {config.dtype.name}"
        if config.d_head != problem.d_head:
            return f"the configuration is for d_head {config.d_head}"
        if device.type == "cuda":
            from flash_attention.backends.cuda import device_facts_of

            if reason := config.infeasible_reason(device_facts_of(device)):
                return reason
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The call allocates nothing."""
        from flash_attention import attention, forward

        config, o = self.kernel.config, torch.empty_like(q)
        whole_tiles = q.shape[1] % config.B_r == 0 and k.shape[1] % config.B_c == 0
        if whole_tiles and q.shape == k.shape and not problem.causal:
            return Prepared(lambda: forward(config, q, k, v, o))
        return Prepared(lambda: attention(q, k, v, causal=problem.causal, config=config, out=o))

    @classmethod
    def of(cls, config: Any, problem: Problem) -> KernelImplementation:
        """The kernel of ``config`` with the traits that ``problem`` needs."""
        return cls(ForwardKernel(config, ForwardTraits(causal=problem.causal)))


@dataclass(frozen=True)
class AttentionImplementation:
    """``flash_attention.attention``: the library's own choice of a kernel."""

    name: str = "attention"
    kind: str = "kernel"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """Available when this version of the library has it."""
        import flash_attention

        return None if hasattr(flash_attention, "attention") else "this version has no attention()"

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The call as a user writes it, its choice built: a kernel that is not gives way to one that is."""
        import flash_attention
        from flash_attention.choosing import problem_of

        if q.is_cuda and not self.options:
            wanted = problem_of(q, k, v, None, problem.causal, (None, None), 0.0, False)
            flash_attention.prepare([wanted], q.device)
        attention = getattr(flash_attention, "attention")  # noqa: B009  (not in every version)
        return Prepared(lambda: attention(q, k, v, causal=problem.causal, **self.options))
