"""The family's backward ladders: from a plain kernel to the one chosen on an H100, one idea a step."""

from __future__ import annotations

from flash_helpers.kernels.ampere.backward.config import DQWarps, FlashBackwardKernelConfig
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.ladder import Rung, Step, climb

_START = Step(
    "base",
    "half of the warps make P and hold dV, the other half makes dS and holds dK; one tile of Q and dO at a "
    "time; the gradient warps make dQ, too",
    {},
)
_SWIZZLED = Step(
    "swizzled",
    "rows of a tile lie in different banks: ldmatrix and the copies have no bank conflicts",
    dict(swizzled=True),
)
_STAGES = Step("two stages", "the next Q and dO are under way while one tile is used", dict(stages=2))
_SLOTS = Step("two dS slots", "the next dS is written while dQ is made of the one before", dict(ds_slots=2))
_SHARED = Step(
    "both halves make dQ",
    "2.5 products for either half instead of 2 and 3: each makes half of the columns",
    dict(dq_warps=DQWarps.BOTH),
)
STEPS = {
    64: (
        _START,
        _SWIZZLED,
        _STAGES,
        _SLOTS,
        _SHARED,
        Step(
            "tiles of 128 queries",
            "a fragment of dS or K is read for twice as many products, and the halves wait half as often",
            dict(B_r=128),
        ),
    ),
    128: (_START, _SWIZZLED, _STAGES, _SLOTS, _SHARED),
    256: (
        _START,
        _SWIZZLED,
        Step(
            "pairs of warps",
            "two warps share 32 keys and halve the columns of dK or dV: fragments serve twice as many rows",
            dict(paired_warps=True),
        ),
        _STAGES,
        _SLOTS,
    ),
}


def get_ampere_backward_ladder(
    dtype: DType = DType.BF16, d_head: int = 128, causal: bool = False
) -> list[Rung[FlashBackwardKernelConfig]]:
    """From the plainest kernel to the one that is chosen on an H100, one idea a step.

    Args:
        dtype: element type.
        d_head: head size, one of ``STEPS``.
        causal: whether the kernels get a causal mask.

    Raises:
        ValueError: no ladder has this head size.
    """
    if d_head not in STEPS:
        raise ValueError(
            f"no Ampere backward ladder for head size {d_head}; there are ladders for 64, 128, 256"
        )
    B_c = 64 if d_head == 256 else 128
    dq_warps = DQWarps.BOTH if d_head == 256 else DQWarps.GRADIENT  # one half has no registers for dQ there
    start = FlashBackwardKernelConfig(dtype, d_head, d_head, 64, B_c, 8, False, dq_warps=dq_warps)
    return climb(start, STEPS[d_head], causal, dtype == DType.BF16)
