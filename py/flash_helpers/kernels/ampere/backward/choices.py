"""The family's best backward kernels for each kind of GPU, with reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from flash_helpers.kernels.ampere.backward.config import DQSum, DQWarps, FlashBackwardKernelConfig
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.traits import BackwardTraits


def _config(
    d_head: int, B_r: int, B_c: int, n_warps: int, d_head_v: int = 0, **changes: Any
) -> FlashBackwardKernelConfig:
    """A BF16 configuration with what every good one of this family has; ``changes`` names the rest."""
    base = FlashBackwardKernelConfig(
        dtype=DType.BF16,
        d_head=d_head,
        d_head_v=d_head_v or d_head,
        B_r=B_r,
        B_c=B_c,
        n_warps=n_warps,
        swizzled=True,
        stages=2,
        ds_slots=2,
        dq_warps=DQWarps.ALTERNATE,
    )
    return replace(base, **changes)


@dataclass(frozen=True)
class BackwardChoice:
    """The best known configuration of a head size on one generation of GPUs.

    Attributes:
        capability: compute capability it is for; (9, 0) was chosen by measurements on an H200, the others
            follow from their resources.
        config: with sums of dQ in any order.
        reason: why.
        deterministic: what else equal bits in every run change in ``config``.
    """

    capability: tuple[int, int]
    config: FlashBackwardKernelConfig
    reason: str
    deterministic: dict[str, Any] = field(default_factory=lambda: dict(dq_sum=DQSum.ORDERED))

    def form(self, dtype: DType, deterministic: bool) -> FlashBackwardKernelConfig:
        """The configuration for an element type, deterministic if wanted."""
        config = replace(self.config, dtype=dtype)
        return replace(config, **self.deterministic) if deterministic else config


_D64 = (
    "tiles of 128 queries: a fragment of dS or K is read for twice as many products of dQ, and warps wait "
    "for each other half as often"
)
_D128 = (
    "32 keys a warp: each fragment of Q and dO is read for two row tiles, and P goes from score to gradient "
    "warp once; all warps share dQ"
)
_D192 = "as many keys as one warp has registers for, with dK and dV of 192 columns"
_D256 = "pairs of warps share 32 keys and halve the columns of dK and dV, which one warp has no registers for"
_ONE_STAGE = "; one stage, for two pass 163 KiB of shared memory"
_SMALL = "the largest tiles that 99 KiB of shared memory hold"
_PAIRED = dict(paired_warps=True, dq_warps=DQWarps.BOTH)
# A warp ends a turn every second tile, with a fence that it waits for.
_IN_TURN: dict[str, Any] = dict(dq_sum=DQSum.ORDERED, dq_warps=DQWarps.ALTERNATE)

CHOICES = (
    # ------------------------------------------------------------------ H100: 227 KiB
    BackwardChoice((9, 0), _config(64, 128, 128, 8, dq_warps=DQWarps.BOTH), _D64, _IN_TURN),
    BackwardChoice((9, 0), _config(128, 64, 128, 8, dq_warps=DQWarps.BOTH), _D128, _IN_TURN),
    BackwardChoice((9, 0), _config(192, 64, 64, 8, 128), _D192),
    BackwardChoice((9, 0), _config(192, 64, 64, 8), _D192),
    BackwardChoice((9, 0), _config(256, 64, 64, 8, **_PAIRED), _D256),
    # ------------------------------------------------------------------ A100: 163 KiB a block
    BackwardChoice((8, 0), _config(64, 128, 128, 8, ds_slots=1, dq_warps=DQWarps.BOTH), _D64, _IN_TURN),
    BackwardChoice(
        (8, 0), _config(128, 64, 128, 8, stages=1, dq_warps=DQWarps.BOTH), _D128 + _ONE_STAGE, _IN_TURN
    ),
    BackwardChoice((8, 0), _config(192, 64, 64, 8, 128), _D192),
    BackwardChoice((8, 0), _config(192, 64, 64, 8, stages=1), _D192 + _ONE_STAGE),
    BackwardChoice((8, 0), _config(256, 64, 64, 8, stages=1, **_PAIRED), _D256 + _ONE_STAGE),
    # ------------------------------------------------------------------ RTX 3090, RTX 4090: 99 KiB a block
    *(
        BackwardChoice(capability, config, _SMALL)
        for capability in ((8, 6), (8, 9))
        for config in (
            _config(64, 64, 128, 8, ds_slots=1, holds_K=True, holds_V=True),
            _config(128, 64, 64, 8, stages=1, paired_warps=True),
            _config(192, 64, 32, 4, 128, stages=1, ds_slots=1, dq_warps=DQWarps.BOTH),
            _config(192, 64, 32, 4, stages=1, ds_slots=1, dq_warps=DQWarps.BOTH),
            _config(256, 64, 16, 4, stages=1, ds_slots=1, **_PAIRED),
        )
    ),
)

SMALL_BLOCKS_FROM, SMALL_BLOCKS = (12, 0), (8, 9)
"""GPUs of compute capability 12 have the shared memory of 8.9, 99 KiB a block, where 9.0 and 10 have 227."""


def choices_for(capability: tuple[int, int]) -> list[BackwardChoice]:
    """The choices of a GPU generation; one without its own has those of the next lower one."""
    limit = SMALL_BLOCKS if capability >= SMALL_BLOCKS_FROM else capability
    known = max((choice.capability for choice in CHOICES if choice.capability <= limit), default=None)
    return [choice for choice in CHOICES if choice.capability == known]


def get_ampere_best_backward_kernels(
    dtypes: Iterable[DType] = (DType.FP16, DType.BF16), capability: tuple[int, int] = (9, 0)
) -> list[BackwardKernel]:
    """Every kernel that the choices name for a GPU, with and without a causal mask, sorted.

    Args:
        dtypes: element types.
        capability: compute capability; what was chosen for exactly this one counts.
    """
    return sorted(
        {
            BackwardKernel(choice.form(dtype, deterministic), BackwardTraits(causal=causal))
            for choice in CHOICES
            if choice.capability == capability
            for dtype in dtypes
            for deterministic in (False, True)
            for causal in (False, True)
        }
    )
