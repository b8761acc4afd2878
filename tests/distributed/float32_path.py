"""Context-parallel attention in float32, which the public function does not take: for equality to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flash_attention.call import Mask
from flash_attention.distributed import Layout
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.function import ContextParallel
from flash_attention.distributed.functions import Functions
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import Heads, Schedule
from flash_attention.distributed.transport import Transport

Function = Callable[..., Any] | None


def in_float32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    layout: Layout,
    method: str,
    mask: Mask,
    scale: float | None = None,
    softcap: float = 0.0,
    functions: tuple[Function, Function] = (None, None),
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of this rank's rows, with gradients: past the checks, by the same schedules.

    Args:
        q, k, v, sinks, layout, method, scale, softcap: as in ``flash_attention.distributed.attention``.
        mask: which keys a query sees.
        functions: ``score_mod`` and ``mask_mod``.
        group: the ranks; None: all.
    """
    recorded = Functions.of(*functions, q)
    schedule = Schedule(method, layout, mask, Heads(q.shape[2], k.shape[2]), recorded is not None)  # type: ignore[arg-type]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    arithmetic = Arithmetic(scale, softcap, functions=recorded)
    transport = Transport(group or dist.group.WORLD, timedelta(seconds=60), q.device)  # type: ignore[arg-type]
    plan = Plan(schedule, transport, arithmetic, arithmetic, True)
    out, lse = ContextParallel.apply(plan, q, k, v, sinks)  # type: ignore[no-untyped-call]
    return out, lse
