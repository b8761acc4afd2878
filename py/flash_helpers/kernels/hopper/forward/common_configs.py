"""What the configurations that the Hopper family chooses have in common; each choice says what it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.softmax import SoftmaxReference


def bf16_config(
    d_head: int, B_r: int, B_c: int, kv_stages: int, q_stages: int, **changes: Any
) -> HopperForwardKernelConfig:
    """A BF16 configuration with what every good one of this family has; ``changes`` names the rest."""
    base = HopperForwardKernelConfig(
        dtype=DType.BF16,
        d_head=d_head,
        d_head_v=changes.pop("d_head_v", None) or d_head,
        B_r=B_r,
        B_c=B_c,
        kv_stages=kv_stages,
        q_stages=q_stages,
        overlap_products=True,
        ping_pong=True,
        softmax_reference=SoftmaxReference.LAGGED,
        forced_overlap=False,
        next_item=NextItem.NONE,
        direct_store=False,
        dynamic_schedule=False,
        head_sections=True,
    )
    return replace(base, **changes)


D64_TALL = bf16_config(64, 256, 64, 6, 2, next_item=NextItem.WITH_LAST_PV)
D64_WIDE = bf16_config(
    64, 192, 128, 2, 2, next_item=NextItem.WITH_LAST_PV, early_pass=True, q_register_steps=1
)
D64_SHORT = bf16_config(64, 128, 128, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True)
D64_TWO_GROUPS = bf16_config(64, 128, 128, 2, 2, next_item=NextItem.WITH_LAST_PV)
D128 = bf16_config(128, 128, 128, 2, 2, forced_overlap=True, next_item=NextItem.AFTER_LAST_PV)
D96 = replace(D128, d_head=96, d_head_v=96)
ONE_Q_SLOT = dict(ping_pong=False, forced_overlap=True, direct_store=True)
D192_ONE_Q = bf16_config(192, 128, 96, 2, 1, **ONE_Q_SLOT)
D256 = bf16_config(256, 128, 64, 2, 1, **ONE_Q_SLOT)
D256_CAUSAL = replace(D256, trimmed=True)
