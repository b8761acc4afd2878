"""The Ampere family's best kernels for each kind of GPU, with reasons, and the ladder that leads there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.defaults import first_filled
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import ForwardTraits


def _config(
    d_head: int, B_r: int, B_c: int, n_warps: int, kv_stages: int, **changes: Any
) -> FlashForwardKernelConfig:
    """A BF16 configuration with what every good one of this family has; ``changes`` names the rest."""
    base = FlashForwardKernelConfig(
        dtype=DType.BF16,
        d_head=d_head,
        B_r=B_r,
        B_c=B_c,
        n_warps=n_warps,
        async_copy=True,
        eager_load_blocks=True,
        swizzled=True,
        Q_mma_load_K_tiles=1,
        K_mma_load_K_tiles=1,
        V_mma_load_K_tiles=1,
        mma_double_buffer_loads=False,
        optimized_softmax=True,
        kv_stages=kv_stages,
        mbarrier=True,
        softmax_reference=SoftmaxReference.ANCHORED,
        tensor_row_sums=False,
        fragments_ahead=1,
    )
    return replace(base, **changes)


@dataclass(frozen=True)
class AmpereChoice:
    """The best known configuration of a range of problems on one generation of GPUs.

    Attributes:
        capability: compute capability it is for; (9, 0) was chosen by measurements on one H100 80GB HBM3, its
            gains are the ladder's (docs/kernels/ampere.md); the others follow from their resources.
        d_head: head size.
        max_seq_len: up to this many queries; None: any number.
        causal: for causal problems only, for others only, or (None) for both.
        config: with an anchored reference, for calls that ask for no LSE.
        reason: why.
        otherwise: what else FP16, an LSE (no ``tensor_row_sums``) or an exact reference change in ``config``:
            each takes registers, and 64 keys next to 32 rows a warp leave none to spare.
    """

    capability: tuple[int, int]
    d_head: int
    max_seq_len: int | None
    causal: bool | None
    config: FlashForwardKernelConfig
    reason: str
    otherwise: dict[str, Any] = field(default_factory=dict)


_HELD_Q = dict(Q_mma_load_K_tiles=0, mbarrier=False)  # the best at head size 64

_UNPAIRED = dict(paired_warps=False, tensor_row_sums=False)  # 16 rows a warp, where pairs lack registers
_D64_REASON = (
    "Q stays in registers, which have room for it here; a barrier of the block, and float32 row sums, were "
    "ahead of mbarriers and of the tensor cores' sums on a forerunner of this kernel"
)

CHOICES = (
    # ------------------------------------------------------------------ H100: 227 KiB
    AmpereChoice((9, 0), 64, None, None, _config(64, 128, 64, 4, 2, **_HELD_Q), _D64_REASON),
    AmpereChoice(
        (9, 0), 128, 1024, None, _config(128, 128, 64, 4, 2, tensor_row_sums=True),
        "two blocks of 4 warps per SM instead of one of 8: blocks end often here, and one computes meanwhile",
    ),
    AmpereChoice(
        (9, 0), 128, 4096, True, _config(128, 128, 64, 4, 2, tensor_row_sums=True),
        "short blocks balance the triangle",
    ),
    AmpereChoice(
        (9, 0), 128, None, None, _config(128, 256, 64, 8, 3, tensor_row_sums=True),
        "8 warps share each K and V block, half of the copies and L2 reads; 4 warps where registers run out",
        otherwise=dict(B_r=128, n_warps=4, kv_stages=2),
    ),
    AmpereChoice(
        (9, 0), 256, 512, True, _config(256, 128, 32, 8, 4, tensor_row_sums=True, paired_warps=True),
        "pairs of warps, as for longer sequences; blocks of 32 keys waste less of the diagonal, +1.5 %",
        otherwise=_UNPAIRED | dict(B_c=64, kv_stages=2),
    ),
    AmpereChoice(
        (9, 0), 256, None, True, _config(256, 128, 64, 8, 2, paired_warps=True),
        "pairs of warps share 32 rows and halve d_head: shared memory, the limit of 16 rows a warp, is read "
        "for 28 % less, +4 to +9 %; row sums in float32 are 1.5 % ahead of the tensor cores' here",
        otherwise=_UNPAIRED,
    ),
    AmpereChoice(
        (9, 0), 256, None, False, _config(256, 128, 64, 8, 2, tensor_row_sums=True, paired_warps=True),
        "pairs of warps share 32 rows and halve d_head: shared memory, the limit of 16 rows a warp, is read "
        "for 28 % less, +4 to +6 %; row sums in float32 would spill",
        otherwise=_UNPAIRED,
    ),
    # ------------------------------------------------------------------ A100: 163 KiB a block
    AmpereChoice((8, 0), 64, None, None, _config(64, 128, 64, 4, 3, **_HELD_Q), _D64_REASON),
    AmpereChoice(
        (8, 0), 128, None, False, _config(128, 256, 64, 8, 3, tensor_row_sums=True),
        "two blocks of 96 KiB do not fit an SM; 8 warps with three stages take 160 KiB and keep two warps "
        "per scheduler; blocks of 32 keys where 64 would spill registers",
        otherwise=dict(B_c=32, kv_stages=4),
    ),
    AmpereChoice(
        (8, 0), 128, None, True, _config(128, 128, 32, 4, 2, tensor_row_sums=True),
        "blocks of 32 keys let two thread blocks of 64 KiB share an SM; short ones balance the triangle",
    ),
    AmpereChoice(
        (8, 0), 128, None, False, _config(128, 128, 32, 4, 2, tensor_row_sums=True),
        "blocks of 32 keys let two thread blocks of 64 KiB share an SM",
    ),
    AmpereChoice(
        (8, 0), 256, None, None, _config(256, 128, 32, 8, 2, tensor_row_sums=True, paired_warps=True),
        "two stages of 64 rows would take 192 KiB; 32 rows take 128 KiB. Pairs of warps as on the H100",
        otherwise=_UNPAIRED,
    ),
    # ------------------------------------------------------------------ RTX 3090, RTX 4090: 99 KiB a block
    *(
        choice
        for capability in ((8, 6), (8, 9))
        for choice in (
            AmpereChoice(
                capability, 64, None, None, _config(64, 128, 64, 4, 2, **_HELD_Q),
                _D64_REASON + "; two blocks of 48 KiB just fit an SM",
            ),
            AmpereChoice(
                capability, 128, None, None, _config(128, 256, 32, 8, 2, tensor_row_sums=True),
                "8 warps, two per scheduler, and two stages fit 96 KiB with blocks of 32 keys",
            ),
            AmpereChoice(
                capability, 256, None, None, _config(256, 128, 32, 8, 1, mbarrier=False),
                "one stage of 32 keys next to Q takes 96 KiB: K and V still load under the other's product",
            ),
        )
    ),
)  # fmt: skip


SMALL_BLOCKS_FROM, SMALL_BLOCKS = (12, 0), (8, 9)
"""GPUs of compute capability 12 have the shared memory of 8.9, 99 KiB a block, where 9.0 and 10 have 227."""


def choose_ampere_kernel(
    dtype: DType,
    d_head: int,
    causal: bool,
    seq_len: int,
    capability: tuple[int, int] = (9, 0),
    lse: bool = False,
    exact: bool = False,
) -> tuple[ForwardKernel, str]:
    """The kernel known best for a problem, and why.

    Args:
        dtype: element type. FP16 takes a lagged reference where BF16 takes an anchored one.
        d_head: head size, one of those in ``CHOICES``.
        causal: whether the mask is causal.
        seq_len: queries a head.
        capability: compute capability of the GPU; one without choices gets those of the next lower one, and
            from ``SMALL_BLOCKS_FROM`` on those of ``SMALL_BLOCKS``, which fit every GPU.
        lse: whether the log-sum-exp is asked for; row sums then stay in float32.
        exact: take the row's true maximum as the reference in every step.

    Raises:
        ValueError: no choice has this head size, or the GPU is older than the family.
    """
    limit = SMALL_BLOCKS if capability >= SMALL_BLOCKS_FROM else capability
    known = sorted({choice.capability for choice in CHOICES if choice.capability <= limit})
    if not known:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]}: this family needs 8.0 or newer"
        )
    fitting = [
        choice
        for choice in CHOICES
        if choice.capability == known[-1]
        and choice.d_head == d_head
        and (choice.max_seq_len is None or seq_len <= choice.max_seq_len)
        and choice.causal in (None, causal)
    ]
    if fitting:
        choice, reason = first_filled(fitting, seq_len)
        return _kernel(choice, dtype, causal, lse, exact), reason
    heads = ", ".join(map(str, sorted({choice.d_head for choice in CHOICES})))
    raise ValueError(f"no Ampere kernel is chosen for head size {d_head}; there are choices for {heads}")


def _kernel(choice: AmpereChoice, dtype: DType, causal: bool, lse: bool, exact: bool) -> ForwardKernel:
    """The kernel of a choice for one dtype, mask and accuracy."""
    if exact:
        reference = SoftmaxReference.EXACT_SKIP_RESCALE
    elif dtype == DType.FP16:
        reference = SoftmaxReference.LAGGED
    else:
        reference = SoftmaxReference.ANCHORED
    config = choice.config
    if lse or exact or dtype == DType.FP16:
        config = replace(config, **choice.otherwise)
    config = replace(
        config,
        dtype=dtype,
        softmax_reference=reference,
        tensor_row_sums=config.tensor_row_sums and not lse,
    )
    if exact and (config.d_head, config.rows_per_warp, config.B_c) == (128, 32, 64):
        config = replace(config, B_c=48)  # the maxima of 64 keys would spill
    return ForwardKernel(config, ForwardTraits(causal=causal))


def get_ampere_best_kernels(
    dtypes: Iterable[DType] = (DType.FP16, DType.BF16), capability: tuple[int, int] = (9, 0)
) -> list[ForwardKernel]:
    """Every kernel that ``choose_ampere_kernel`` can choose on a GPU, sorted, each once.

    Args:
        dtypes: element types.
        capability: compute capability; what was chosen for exactly this one counts.

    Returns:
        Kernels of all head sizes, with and without a causal mask; empty where nothing was chosen.
    """
    return sorted(
        {
            _kernel(choice, dtype, causal, lse, exact)
            for choice in CHOICES
            if choice.capability == capability
            for dtype in dtypes
            for causal in ((False, True) if choice.causal is None else (choice.causal,))
            for lse in (False, True)
            for exact in (False, True)
        }
    )
