"""The Ampere family's ladders: the seven steps, and beyond them to the kernels that are chosen on an H100."""

from __future__ import annotations

from typing import Any

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.ampere.forward.sets import LADDER as SEVEN
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.ladder import Rung, Step, climb
from flash_helpers.kernels.softmax import SoftmaxReference

_WHY = (
    "the start: cp.async copies, every operand of a block loaded before its products",
    "rows of a tile lie in different banks: ldmatrix and the copies have no bank conflicts",
    "the next block is copied while this one is computed",
    "operands come two tiles at a time between the products, so that registers suffice without spilling",
    "the next tiles are loaded while the present ones are multiplied",
    "scale and log2 e are one multiply-add before the exponential; the first block rescales nothing",
    "Q stays in registers instead of being read again for each block; the second buffer makes room for it",
)
_FIELDS = (
    "eager_load_blocks",
    "swizzled",
    "Q_mma_load_K_tiles",
    "K_mma_load_K_tiles",
    "V_mma_load_K_tiles",
    "mma_double_buffer_loads",
    "optimized_softmax",
)


def _seven() -> list[Step]:
    """The seven steps, each with the fields that differ from the step before."""
    steps, before = [], dict[str, Any]()
    for (idea, values), why in zip(SEVEN, _WHY, strict=True):
        now = dict(zip(_FIELDS, values, strict=True))
        steps.append(Step(idea, why, {k: v for k, v in now.items() if before.get(k) != v}))
        before = now
    return steps


_FRAGMENTS = Step(
    "fragment by fragment",
    "one ldmatrix ahead of its products keeps as few fragments in registers as there can be: room for more "
    "rows",
    dict(K_mma_load_K_tiles=1, V_mma_load_K_tiles=1, fragments_ahead=1),
)
_STREAMED_FRAGMENTS = Step(_FRAGMENTS.idea, _FRAGMENTS.why, {**_FRAGMENTS.changes, "Q_mma_load_K_tiles": 1})
_STAGES = Step(
    "two K/V stages",
    "whole blocks are under way ahead of their use, not only parts of one",
    dict(kv_stages=2),
)
_MBARRIERS = Step(
    "mbarriers",
    "warps wait for copies and for free stages, not for each other: one's softmax meets another's products",
    dict(mbarrier=True),
)
_LAGGED = Step(
    "lagged softmax reference",
    "the exponentials need not wait for the block's maximum and its shuffles",
    dict(softmax_reference=SoftmaxReference.LAGGED),
)
_ANCHORED = Step(
    "anchored softmax reference",
    "no maximum at all after the first blocks; checked once at the end",
    dict(softmax_reference=SoftmaxReference.ANCHORED),
    bf16_only=True,
)

STEPS: dict[int, list[Step]] = {
    64: [
        *_seven(),
        _FRAGMENTS,
        _STAGES,
        Step(
            "32 rows a warp",
            "a fragment of K or V serves two row tiles: half the shared-memory reads for a product",
            dict(B_r=128),
        ),
        _LAGGED,
        _ANCHORED,
    ],
    128: [
        *_seven(),
        _FRAGMENTS,
        Step(
            "32 rows a warp",
            "a fragment of K or V serves two row tiles: half the shared-memory reads for a product; O and S "
            "of 32 rows leave no registers for Q",
            dict(B_r=128, Q_mma_load_K_tiles=1),
        ),
        _STAGES,
        _MBARRIERS,
        Step(
            "row sums on the tensor cores",
            "8 more products of a block replace 64 additions of each thread",
            dict(tensor_row_sums=True),
        ),
        _LAGGED,
        _ANCHORED,
        Step(
            "eight warps, three stages",
            "half as many copies and reads from L2, since 256 rows share each K and V block",
            dict(B_r=256, n_warps=8, kv_stages=3),
            bf16_only=True,
        ),
    ],
    256: [
        Step(
            "the sixth step without a second buffer",
            "the start: O of 16 rows takes half of the registers, so that whole operands would spill",
            {},
        ),
        Step(
            "eight warps",
            "128 rows share each K and V block; two warps a scheduler",
            dict(B_r=128, n_warps=8),
        ),
        _STREAMED_FRAGMENTS,
        _STAGES,
        _MBARRIERS,
        _LAGGED,
        _ANCHORED,
        Step(
            "row sums on the tensor cores",
            "frees the registers that pairs of warps need",
            dict(tensor_row_sums=True),
            causal=False,
            bf16_only=True,
        ),
        Step(
            "pairs of warps",
            "two warps share 32 rows and halve d_head: a fragment of K or V serves two row tiles",
            dict(paired_warps=True),
            bf16_only=True,
        ),
    ],
}
"""By head size."""


def get_ampere_ladder(
    dtype: DType = DType.BF16, d_head: int = 128, causal: bool = False
) -> list[Rung[FlashForwardKernelConfig]]:
    """From the plainest kernel to the one that is chosen on an H100, one idea a step.

    Args:
        dtype: element type; FP16 ends before the steps that need BF16.
        d_head: head size, one of ``STEPS``.
        causal: whether the kernels get a causal mask.

    Raises:
        ValueError: no ladder has this head size.
    """
    if d_head not in STEPS:
        raise ValueError(f"no Ampere ladder for head size {d_head}; there are ladders for 64, 128, 256")
    streamed = d_head == 256
    tiles = 2 if streamed else 0
    start = FlashForwardKernelConfig(
        dtype, d_head, 64, 64, 4, True, streamed, streamed, tiles, tiles, tiles, False, streamed
    )
    return climb(start, STEPS[d_head], causal, dtype == DType.BF16)
