"""The Hopper family's default backward configuration for each range of problems, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.resources import DqOutput
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.traits import PLAIN_BACKWARD, BackwardTraits


def _summed(d_head: int, B_r: int, **changes: Any) -> HopperBackwardKernelConfig:
    """A BF16 configuration of one kernel for all gradients; ``changes`` names what is not as usual."""
    base = HopperBackwardKernelConfig(
        dtype=DType.BF16,
        d_head=d_head,
        d_head_v=d_head,
        B_r=B_r,
        B_c=128,
        q_stages=2,
        k_stages=2,
        v_stages=1,
        dq_output=DqOutput.BULK_REDUCTION,
        late_dq=True,
        ping_pong=True,
        lse_ahead=True,
        float_p=False,
        dynamic_schedule=True,
        head_sections=True,
        reversed_heads=True,
    )
    return replace(base, **changes)


def _two_kernels(d_head: int, d_head_v: int, dq_B_c: int, **changes: Any) -> HopperBackwardKernelConfig:
    """One with a kernel of dQ beside that of dK and dV."""
    split = d_head > 128
    return replace(
        _summed(d_head, 64),
        **{
            "d_head_v": d_head_v,
            "B_c": 64 if split else 128,
            "k_stages": 1 if split else 2,
            "v_stages": 1 if split else 2,
            "dq_output": DqOutput.OWN_KERNEL,
            "late_dq": False,
            "ping_pong": not split,
            "float_p": True,
            "split_gradients": split,
            "dq_B_c": dq_B_c,
            **changes,
        },
    )


@dataclass(frozen=True)
class HopperBackwardChoice:
    """The default configuration of a range of problems: what runs unless tuning has found a faster one.

    Attributes:
        d_head: head size of the kernel.
        d_head_v: that of V.
        config: in BF16.
        reason: why. Figures are rates of benchmarks/results/h200-hopper-backward-variants.json: one H200
            (2026-11-28), bf16, 16384 tokens, hidden size 2048, everything that a backward call needs, TFLOP/s
            of five products; of head size 96 of h200-hopper-backward-96.json (2026-11-29), 21 heads.
        masked: for causal and windowed problems only, for others only, or (None) for both.
        deterministic: equal calls have to give equal bits, or need not, or (None) both.
        softcap: scores are capped, or not, or (None) both.
        max_seq_len: up to this many queries; None: any number.
        min_fill: so much of the SMs' rounds is filled by thread blocks that take a head each; 0: whatever is.
    """

    d_head: int
    d_head_v: int
    config: HopperBackwardKernelConfig
    reason: str
    masked: bool | None = None
    deterministic: bool | None = None
    softcap: bool | None = None
    max_seq_len: int | None = None
    min_fill: float = 0.0

    def fits(
        self,
        sizes: tuple[int, int],
        traits: BackwardTraits,
        deterministic: bool,
        seq_len: int,
        fill: float = 0.0,
    ) -> bool:
        """Whether it was made for such a problem."""
        wanted = (traits.causal or traits.window, deterministic, traits.softcap)
        own = (self.masked, self.deterministic, self.softcap)
        return (
            (self.d_head, self.d_head_v) == sizes
            and all(a is None or a == b for a, b in zip(own, wanted, strict=True))
            and (self.max_seq_len is None or seq_len <= self.max_seq_len)
            and fill >= self.min_fill
        )


_D64 = _summed(64, 128)
_D64_FULL = replace(_D64, head_sections=False)
_D64_RED = replace(_D64_FULL, dq_output=DqOutput.REGISTER_REDUCTION, v_stages=2, ping_pong=False)
_D64_OWN = _two_kernels(64, 64, 128, B_r=128, float_p=False)
_D64_CAPPED = _two_kernels(64, 64, 128)
_D96 = _summed(96, 64, float_p=True)
_D96_OWN = _two_kernels(96, 96, 96)
_D128_BLOCK = _summed(128, 64, dq_output=DqOutput.BLOCK_SUMS, head_sections=False)
_D128 = _summed(128, 64, float_p=True)
_D128_OWN = _two_kernels(128, 128, 96)
_TWO_KERNELS = "dK, dV and dQ fit no block together"
_WHOLE_HEADS = "nothing is cleared before and rounded after, and bits are equal in every run"
_FILL = 0.85  # of the SMs' rounds
_EQUAL_BITS = "two kernels, so that nothing is added in an order that may differ"

D64_BLOCK = _summed(64, 128, dq_output=DqOutput.BLOCK_SUMS, lse_ahead=False, head_sections=False)
"""What ``tune`` measures, and nothing chooses yet."""

CHOICES: tuple[HopperBackwardChoice, ...] = (
    HopperBackwardChoice(
        64,
        64,
        _D64_CAPPED,
        "with 128 rows the derivative of the cap has no registers; not measured",
        softcap=True,
    ),
    HopperBackwardChoice(
        64,
        64,
        _D64_OWN,
        "225 at 512 keys, and equal bits in every run; with dQ summed 224",
        masked=True,
        max_seq_len=512,
    ),
    HopperBackwardChoice(
        64,
        64,
        _D64_OWN,
        f"{_EQUAL_BITS}: 325 at 512 keys; without turns 320",
        deterministic=True,
        max_seq_len=512,
    ),
    HopperBackwardChoice(
        64,
        64,
        replace(_D64_OWN, ping_pong=False),
        f"{_EQUAL_BITS}: 382, 423, 433 and 421 at 1024, 2048, 4096 and 16384 keys, causal 298, 364, 412 and "
        "430; with turns 376, 406, 405 and 391, causal 298, 358, 399 and 401",
        deterministic=True,
    ),
    HopperBackwardChoice(
        64,
        64,
        _D64_FULL,
        "374, 473, 539 and 576 at 512 to 4096 keys; from registers, without turns, 368, 469, 538 and 574",
        masked=False,
        max_seq_len=4096,
    ),
    HopperBackwardChoice(
        64,
        64,
        _D64_RED,
        "594 at 16384 keys; staged, in turns, 580",
        masked=False,
    ),
    HopperBackwardChoice(
        64,
        64,
        _D64,
        "342, 446, 524 and 583 at 1024, 2048, 4096 and 16384 keys; from registers, without turns, 332, 438, "
        "519 and 571",
        masked=True,
    ),
    HopperBackwardChoice(
        96,
        96,
        _D96_OWN,
        "222 at 512 keys, and equal bits in every run; with dQ summed 220, padded 211",
        masked=True,
        max_seq_len=512,
    ),
    HopperBackwardChoice(
        96,
        96,
        _D96_OWN,
        f"{_EQUAL_BITS}: 314, 461 and 452 at 512, 4096 and 16384 keys, causal 408 and 451 from 4096 on; "
        "padded 269, 397 and 386, causal 352 and 387",
        deterministic=True,
    ),
    HopperBackwardChoice(
        96,
        96,
        replace(_D96, trimmed=True),
        "495 and 590 at 4096 and 16384 keys; padded 450 and 527",
        masked=True,
    ),
    HopperBackwardChoice(
        96,
        96,
        replace(_D96, head_sections=False),
        "354, 581 and 613 at 512, 4096 and 16384 keys; padded 333, 513 and 515",
    ),
    HopperBackwardChoice(
        128,
        128,
        _D128_BLOCK,
        f"{_WHOLE_HEADS}: ahead of two kernels and of dQ summed at 512 keys, without a mask behind; timed on "
        "a card that others used, too, so that there are no figures",
        masked=True,
        softcap=False,
        max_seq_len=512,
        min_fill=_FILL,
    ),
    HopperBackwardChoice(
        128,
        128,
        _D128_OWN,
        "262 and 357 at 512 and 1024 keys, and equal bits in every run; with dQ summed 234 and 364",
        masked=True,
        max_seq_len=1024,
    ),
    HopperBackwardChoice(
        128,
        128,
        _D128_OWN,
        f"{_EQUAL_BITS}: 373, 454, 495, 503 and 503 at 512, 1024, 2048, 4096 and 16384 keys, causal 434, 487 "
        "and 506 from 2048 on",
        deterministic=True,
    ),
    HopperBackwardChoice(
        128,
        128,
        replace(_D128, trimmed=True),
        "488, 576 and 657 at 2048, 4096 and 16384 keys; untrimmed 482, 571 and 652",
        masked=True,
    ),
    HopperBackwardChoice(
        128,
        128,
        replace(_D128, head_sections=False),
        "393, 509, 590, 631 and 635 at 512, 1024, 2048, 4096 and 16384 keys; with two kernels 373, 454, 495, "
        "503 and 503",
    ),
    HopperBackwardChoice(192, 128, _two_kernels(192, 128, 80), f"{_TWO_KERNELS}; not measured"),
    HopperBackwardChoice(192, 192, _two_kernels(192, 192, 64), f"{_TWO_KERNELS}; not measured"),
    HopperBackwardChoice(
        256,
        256,
        _two_kernels(256, 256, 64),
        f"{_TWO_KERNELS}: 380, 451, 495, 508 and 527 at 512, 1024, 2048, 4096 and 16384 keys, causal 264, "
        "356, 429, 472 and 514; 48 keys a step of dQ's kernel 367, 435, 480, 498 and 495",
    ),
)


def choose_hopper_backward_kernel(
    dtype: DType,
    sizes: tuple[int, int],
    seq_len: int,
    traits: BackwardTraits = PLAIN_BACKWARD,
    deterministic: bool = False,
    fill: float = 0.0,
) -> tuple[BackwardKernel, str]:
    """The kernel that runs for a problem unless tuning has found a faster one, and why.

    Args:
        dtype: element type. Choices were measured in bf16; fp16 runs the same instructions.
        sizes: (d_head, d_head_v) of the kernel, those of a choice.
        seq_len: queries a head.
        traits: what the kernel must be able to do.
        deterministic: equal calls have to give equal bits.
        fill: see ``HopperBackwardChoice``.

    Raises:
        ValueError: no choice has these head sizes.
    """
    for choice in CHOICES:
        if choice.fits(sizes, traits, deterministic, seq_len, fill):
            return BackwardKernel(replace(choice.config, dtype=dtype), traits), choice.reason
    known = ", ".join(sorted({f"{c.d_head}/{c.d_head_v}" for c in CHOICES}))
    raise ValueError(
        f"no Hopper backward kernel is chosen for head sizes {sizes[0]}/{sizes[1]}; there are choices for "
        f"{known}"
    )
