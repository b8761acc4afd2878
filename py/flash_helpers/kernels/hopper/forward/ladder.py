"""The Hopper family's ladders, from a kernel that does one thing at a time to those that are chosen."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.ladder import Rung, Step, climb
from flash_helpers.kernels.softmax import SoftmaxReference

_START = Step(
    "specialised warpgroups",
    "the start: one warpgroup copies by TMA, the others multiply by wgmma and wait for each product",
    {},
)
_PING_PONG = Step(
    "ping-pong",
    "warpgroups take turns to issue products: one's softmax meets another's products",
    dict(ping_pong=True),
)
_TWO_PRODUCTS = Step(
    "two products at a time",
    "Q K^T of a tile runs together with P V of the tile before, and the softmax under both",
    dict(overlap_products=True),
)
_LAGGED = Step(
    "lagged softmax reference",
    "the exponentials need not wait for the tile's maximum and its shuffles",
    dict(softmax_reference=SoftmaxReference.LAGGED),
)
_FORCED = Step(
    "softmax kept under P V",
    "a branch keeps the compiler from waiting for P V before the exponentials",
    dict(forced_overlap=True),
)
_SECOND_Q = Step(
    "second Q slot", "the next item's Q arrives while O of this one leaves through its slot", dict(q_stages=2)
)
_WITH_LAST_PV = Step(
    "next item's first product with the last P V",
    "the tensor cores do not stand still between two items: the next softmax has its scores",
    dict(next_item=NextItem.WITH_LAST_PV),
)
_SECTIONS = Step(
    "heads in sections",
    "K and V of the heads at work stay in the L2 cache; longest items first under a causal mask",
    dict(head_sections=True),
)
_COUNTER = Step(
    "items from a counter",
    "items under a mask differ in length: whoever is free takes the next, static rounds leave blocks idle",
    dict(dynamic_schedule=True),
    causal=True,
)
_TRIMMED = Step(
    "tiles above the diagonal passed on",
    "the warpgroups that see nothing of a tile do not multiply it",
    dict(trimmed=True),
    causal=True,
)
_PAIRED = Step(
    "two blocks share K and V",
    "each loads half of a tile for both: a tile leaves the L2 cache once for two SMs",
    dict(paired_blocks=True),
)

STEPS: dict[int, list[Step]] = {
    64: [
        _START,
        _PING_PONG,
        _TWO_PRODUCTS,
        _LAGGED,
        _SECOND_Q,
        _WITH_LAST_PV,
        _SECTIONS,
        _COUNTER,
        _TRIMMED,
        Step(
            "sections of 64 heads",
            "K and V of twice as many heads still fit the L2 cache, and fewer sections end unevenly",
            dict(section_heads=64),
            causal=True,
        ),
        Step(
            "192 x 128 instead of 256 x 64",
            "half as many steps, and each has its latency",
            dict(B_r=192, B_c=128, kv_stages=2),
            causal=False,
        ),
        Step(
            "the turn goes on half way through P V",
            "the barrier's latency falls under the other half",
            dict(early_pass=True),
            causal=False,
        ),
        Step(
            "a quarter of Q from registers",
            "shared memory, from which both operands of Q K^T come, is read less",
            dict(q_register_steps=1),
            causal=False,
        ),
    ],
    128: [
        _START,
        _PING_PONG,
        _TWO_PRODUCTS,
        _LAGGED,
        _FORCED,
        _SECOND_Q,
        _WITH_LAST_PV,
        Step(
            "... after the last P V",
            "O is divided and stored while the next item's first product runs",
            dict(next_item=NextItem.AFTER_LAST_PV),
        ),
        _SECTIONS,
        _COUNTER,
        replace(_PAIRED, causal=False),
    ],
    256: [
        _START,
        _TWO_PRODUCTS,
        _LAGGED,
        _FORCED,
        Step(
            "O stored from registers",
            "shared memory holds one Q slot: it is free for the next Q as soon as the last score is computed",
            dict(direct_store=True),
        ),
        _SECTIONS,
        _COUNTER,
        _TRIMMED,
        _PAIRED,
    ],
}
"""By head size."""

_SIZES = {64: (256, 64, 6), 128: (128, 128, 2), 256: (128, 64, 2)}  # B_r, B_c, kv_stages


def get_hopper_ladder(
    dtype: DType = DType.BF16, d_head: int = 128, causal: bool = False
) -> list[Rung[HopperForwardKernelConfig]]:
    """Each idea added to those before it, up to a kernel that is chosen.

    Args:
        dtype: element type.
        d_head: head size, one of ``STEPS``.
        causal: whether the kernels get a causal mask: some steps are for one mask only.

    Raises:
        ValueError: no ladder has this head size.
    """
    if d_head not in STEPS:
        raise ValueError(f"no Hopper ladder for head size {d_head}; there are ladders for 64, 128, 256")
    B_r, B_c, kv_stages = _SIZES[d_head]
    start = HopperForwardKernelConfig(
        dtype=dtype,
        d_head=d_head,
        d_head_v=d_head,
        B_r=B_r,
        B_c=B_c,
        kv_stages=kv_stages,
        q_stages=1,
        overlap_products=False,
        ping_pong=False,
        softmax_reference=SoftmaxReference.EXACT,
        forced_overlap=False,
        next_item=NextItem.NONE,
        direct_store=False,
        dynamic_schedule=False,
        head_sections=False,
    )
    return climb(start, STEPS[d_head], causal, dtype == DType.BF16)


def get_hopper_progression_configs(dtype: DType = DType.BF16) -> list[HopperForwardKernelConfig]:
    """The ladder for head size 128: the steps of both masks, each configuration once.

    Args:
        dtype: element type.

    Returns:
        Configurations in the order of the steps, the causal ladder's first.
    """
    ladders = (get_hopper_ladder(dtype, causal=causal) for causal in (True, False))
    return list(dict.fromkeys(rung.config for ladder in ladders for rung in ladder))
