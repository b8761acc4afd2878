"""What a plain call would pay if one kernel served both it and windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_helpers.benchmark.cases import D_HEAD, DTYPE, Case, expected_output, make_inputs
from flash_helpers.benchmark.implementations import Prepared
from flash_helpers.benchmark.measuring import measure_checked
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.kernels.kernel import Kernel

PLAIN = Case("plain", 4, 4096, 4096, 16, 16)


def with_windows(kernel: Kernel) -> Kernel:
    """The same configuration compiled for windows too."""
    return replace(kernel, traits=replace(kernel.traits, window=True))


def cost_of_windows(device: torch.device, rounds: int) -> dict[str, Any]:
    """Times of the plain kernel, and of the same configuration compiled for windows but given none.

    Returns:
        ``kernel``; ``plain`` and ``windowed``: milliseconds; ``plain_over_windowed``. Where one of them is
        wrong or failed: ``not_timed`` with the reasons. Empty on the CPU.
    """
    if device.type != "cuda":
        return {}
    from flash_attention import explain_choice
    from flash_attention.backends import cuda

    x = make_inputs(PLAIN, device)
    plain = explain_choice(x.q, x.k, x.v).kernel
    assert plain is not None  # the call has rows
    unbounded = cuda.Features(d_head_v=D_HEAD)

    def prepared(kernel: Kernel, *features: Any) -> Prepared:
        o = torch.full_like(x.q, float("nan"))

        def call() -> Tensor:
            cuda.forward(kernel, x.q, x.k, x.v, o, None, D_HEAD**-0.5, *features)
            return o

        return Prepared(call)

    calls: dict[str, Callable[[], Prepared]] = {
        "plain": partial(prepared, plain),
        "windowed": partial(prepared, with_windows(plain), unbounded),
    }
    measured = measure_checked(
        calls,
        lambda: expected_output(PLAIN, x),
        DTYPE,
        device,
        timer_for(device),
        Plan(rounds, ("hot",)),
        PLAIN.label(),
    )
    if wrong := {name: f"{one.status}: {one.reason}" for name, one in measured.items() if one.status != "ok"}:
        return {"kernel": plain.short_form(), "not_timed": wrong}
    times = {name: one.timings["hot"].to_json() for name, one in measured.items()}
    ratio = times["plain"]["median"] / times["windowed"]["median"]
    return {"kernel": plain.short_form(), **times, "plain_over_windowed": ratio}
