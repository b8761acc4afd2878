"""The Hopper family's default backward configuration for each range of problems, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward.config import DqOutput, HopperBackwardKernelConfig
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.traits import BackwardTraits


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
        masked: for causal and windowed problems only, for others only, or (None) for both.
        deterministic: equal calls have to give equal bits, or need not, or (None) both.
        softcap: likewise, of capped scores.
        config: in BF16.
        reason: why, with what it was measured on.
    """

    d_head: int
    d_head_v: int
    masked: bool | None
    deterministic: bool | None
    softcap: bool | None
    config: HopperBackwardKernelConfig
    reason: str

    def fits(self, sizes: tuple[int, int], traits: BackwardTraits, deterministic: bool) -> bool:
        """Whether it was made for such a problem."""
        wanted = (traits.causal or traits.window, deterministic, traits.softcap)
        own = (self.masked, self.deterministic, self.softcap)
        return (self.d_head, self.d_head_v) == sizes and all(
            a is None or a == b for a, b in zip(own, wanted, strict=True)
        )


CHOICES: tuple[HopperBackwardChoice, ...] = (
    HopperBackwardChoice(
        64,
        64,
        False,
        False,
        False,
        _summed(
            64,
            128,
            dq_output=DqOutput.REGISTER_REDUCTION,
            v_stages=2,
            ping_pong=False,
            lse_ahead=False,
        ),
        "dQ leaves from registers and no turns are taken",
    ),
    HopperBackwardChoice(64, 64, True, False, False, _summed(64, 128), "dQ staged, turns, LSE ahead"),
    HopperBackwardChoice(
        64,
        64,
        None,
        None,
        None,
        _two_kernels(64, 64, 128),
        "two kernels: nothing is added in an order that may differ; and the derivative of the cap has registers",
    ),
    HopperBackwardChoice(
        128, 128, None, False, None, _summed(128, 64, float_p=True), "dQ staged, turns, LSE ahead, P in float32"
    ),
    HopperBackwardChoice(
        128,
        128,
        None,
        None,
        None,
        _two_kernels(128, 128, 96),
        "two kernels: nothing is added in an order that may differ",
    ),
    HopperBackwardChoice(
        192, 128, None, None, None, _two_kernels(192, 128, 80), "dK, dV and dQ fit no block together"
    ),
    HopperBackwardChoice(
        192, 192, None, None, None, _two_kernels(192, 192, 64), "dK, dV and dQ fit no block together"
    ),
    HopperBackwardChoice(
        256, 256, None, None, None, _two_kernels(256, 256, 64), "dK, dV and dQ fit no block together"
    ),
)


def choose_hopper_backward_kernel(
    dtype: DType, sizes: tuple[int, int], traits: BackwardTraits, deterministic: bool
) -> tuple[BackwardKernel, str]:
    """The kernel that runs for a problem unless tuning has found a faster one, and why.

    Args:
        dtype: element type. Choices were measured in bf16; fp16 runs the same instructions.
        sizes: (d_head, d_head_v) of the kernel, those of a choice.
        traits: what the kernel must be able to do.
        deterministic: equal calls have to give equal bits.

    Raises:
        ValueError: no choice has these head sizes.
    """
    for choice in CHOICES:
        if choice.fits(sizes, traits, deterministic):
            return BackwardKernel(replace(choice.config, dtype=dtype), traits), choice.reason
    known = ", ".join(sorted({f"{c.d_head}/{c.d_head_v}" for c in CHOICES}))
    raise ValueError(
        f"no Hopper backward kernel is chosen for head sizes {sizes[0]}/{sizes[1]}; there are choices for {known}"
    )
