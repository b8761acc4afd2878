"""The Hopper family's backward ladders: from a plain kernel to the one that is chosen, one idea a step."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.resources import DqOutput
from flash_helpers.kernels.ladder import Rung, Step, climb

_START = Step(
    "specialised warpgroups",
    "the start: one warpgroup copies by TMA, two multiply by wgmma, 64 keys each; dQ is added from registers",
    {},
)
_SECOND_K = Step(
    "second K and V slots",
    "the next item's keys arrive while this one's are in use",
    dict(k_stages=2, v_stages=2),
)
_LATE = Step(
    "dQ one block late",
    "its dS has long been there: the warpgroups need not wait for each other",
    dict(late_dq=True),
)
_STAGED = Step(
    "dQ staged for bulk reductions",
    "one instruction adds what 128 threads added; V gives a slot for the room",
    dict(dq_output=DqOutput.BULK_REDUCTION, v_stages=1),
)
_PING_PONG = Step(
    "ping-pong",
    "the warpgroups take turns: one's exponentials and dS meet the other's dK, dQ and S",
    dict(ping_pong=True),
)
_LSE_AHEAD = Step(
    "LSE ahead",
    "the exponentials wait for no shared memory: the next LSE is read while the next scores are computed",
    dict(lse_ahead=True),
)
_FLOAT_P = Step(
    "P in float32",
    "dS is made of P before it is rounded: fewer conversions, and a smaller error",
    dict(float_p=True),
)
_REVERSED = Step(
    "heads from last to first",
    "what the kernel before has touched last is in the L2 cache",
    dict(reversed_heads=True),
)
_SECTIONS = Step(
    "heads in sections",
    "under a mask items differ in length: short items of many heads fill the end",
    dict(head_sections=True),
    causal=True,
)
_COUNTER = Step(
    "items from a counter",
    "whoever is free takes the next item, static rounds leave blocks idle",
    dict(dynamic_schedule=True),
)
_TRIMMED = Step(
    "blocks above the diagonal passed on",
    "a warpgroup multiplies nothing of a query block that sees none of its keys",
    dict(trimmed=True),
    causal=True,
)
_SHARED_STEPS = [_START, _SECOND_K, _COUNTER, _SECTIONS, _REVERSED, _LATE]

STEPS: dict[int, list[Step]] = {
    64: [
        *_SHARED_STEPS,
        *(replace(step, causal=True) for step in (_STAGED, _PING_PONG)),
        _LSE_AHEAD,
    ],
    128: [*_SHARED_STEPS, _STAGED, _PING_PONG, _LSE_AHEAD, _FLOAT_P, _TRIMMED],
    256: [
        replace(
            _START,
            why="the start: two kernels, one of them for dQ; of 64 keys one warpgroup makes S and dV, the "
            "other dP and dK: a warpgroup has no registers for both gradients",
        ),
        _COUNTER,
        _REVERSED,
        _LSE_AHEAD,
        replace(_FLOAT_P, why="what one warpgroup hands to the other is P before it is rounded"),
    ],
}
"""By head size."""


def get_hopper_backward_ladder(
    dtype: DType = DType.BF16, d_head: int = 128, causal: bool = False
) -> list[Rung[HopperBackwardKernelConfig]]:
    """Each idea added to those before it, up to a kernel that is chosen.

    Args:
        dtype: element type.
        d_head: head size, one of ``STEPS``.
        causal: whether the kernels get a causal mask: some steps are for one mask only.

    Raises:
        ValueError: no ladder has this head size.
    """
    if d_head not in STEPS:
        known = ", ".join(map(str, STEPS))
        raise ValueError(f"no Hopper backward ladder for head size {d_head}; there are ladders for {known}")
    split = d_head == 256
    start = HopperBackwardKernelConfig(
        dtype=dtype,
        d_head=d_head,
        d_head_v=d_head,
        B_r=128 if d_head == 64 else 64,
        B_c=64 if split else 128,
        q_stages=2,
        k_stages=1,
        v_stages=1,
        dq_output=DqOutput.OWN_KERNEL if split else DqOutput.REGISTER_REDUCTION,
        late_dq=False,
        ping_pong=False,
        lse_ahead=False,
        float_p=False,
        dynamic_schedule=False,
        head_sections=split,
        reversed_heads=False,
        split_gradients=split,
        dq_B_c=64 if split else 0,
    )
    return climb(start, STEPS[d_head], causal, dtype == DType.BF16)
