"""The Hopper family's defaults for problems with few blocks of queries, or with few keys."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.common_configs import D64_TALL, D128, ONE_Q_SLOT, bf16_config
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.hopper.forward.resources import WARPGROUP_ROWS

_FEW = "one block of 64 queries an SM, where blocks of 128 leave half of the SMs idle: "
FEW_BLOCKS_CHOICES = (
    HopperChoice(
        64, None, None, bf16_config(64, 64, 128, 4, 1, ping_pong=False, direct_store=True),
        _FEW + "a third of the time of 256 rows, three quarters of that of 128 at 1024 keys (H200)",
        max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        64, None, None, bf16_config(64, 128, 128, 4, 1, direct_store=True),
        "one block of 128 queries an SM, where taller blocks leave SMs idle: two thirds of the time of 256 x "
        "64 at 1024 keys and 16 heads (H200, h200-short-sequences.json)",
        few_blocks_of=128,
    ),
    HopperChoice(
        96, None, None, bf16_config(96, 64, 128, 3, 1, **ONE_Q_SLOT),
        _FEW + "as for head sizes 64, 128 and 256, for want of measurements", max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        128, None, None, bf16_config(128, 64, 128, 3, 1, **ONE_Q_SLOT),
        _FEW + "two thirds of the time of 128 rows at 512 keys, a third of that of 128 rows with keys in "
        "parts at 1024 (H200)", max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        128, 2048, None, replace(D128, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "one block an SM has no next item, and starts sooner where it is no cluster: +3 % at 2048, +1 % "
        "under a causal mask (H200)", max_keys=2048, few_blocks_of=128,
    ),
    *(
        HopperChoice(
            192, None, None, bf16_config(192, 64, 64, 3, 1, d_head_v=d_head_v, **ONE_Q_SLOT),
            _FEW + "as for head sizes 64, 128 and 256, for want of measurements",
            d_head_v=d_head_v, max_keys=2048, few_blocks_of=64,
        )
        for d_head_v in (None, 128)
    ),
    HopperChoice(
        256, None, None, bf16_config(256, 64, 64, 2, 1, ping_pong=False, direct_store=True),
        _FEW + "two thirds of the time of 128 rows at 1024 keys (H200)", max_keys=2048, few_blocks_of=64,
    ),
)  # fmt: skip
"""For problems that leave SMs idle."""

ONE_SMALL_TILE_CHOICES = tuple(
    HopperChoice(
        d_head, WARPGROUP_ROWS, None,
        bf16_config(
            d_head, WARPGROUP_ROWS, 64, kv_stages, 4, ping_pong=False, next_item=NextItem.WITH_LAST_PV,
            direct_store=True,
        ),
        f"queries and keys are one tile of 64, and four of them are on their way: {gain} (H200, "
        "h200-short-sequences.json)",
        max_keys=64,
    )
    for d_head, kv_stages, gain in (
        (64, 6, "78 % of the time of 128 x 80, 57 % of that of 256 x 64"),
        (128, 4, "87 % of the time of 128 x 128 at 64 keys, 47 % at 32, causal"),
    )
)  # fmt: skip
"""For many sequences of up to 64."""

FEW_KEYS_CHOICES = (
    *ONE_SMALL_TILE_CHOICES,
    HopperChoice(
        64, None, False,
        bf16_config(64, 192, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 55 % of the time of 256 x 64 at 77 keys, "
        "60 % at 16 (H200)",
        max_keys=80,
    ),
    HopperChoice(
        64, None, False,
        bf16_config(64, 128, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 7 % behind 192 x 80 at 4096 queries",
        max_keys=80,
    ),
    HopperChoice(
        64, 4096, False,
        replace(D64_TALL, q_stages=3),
        "a third Q slot, since items are short: +6 % at 256 keys (H200)",
        max_keys=256,
    ),
    HopperChoice(
        128, None, False,
        bf16_config(128, 128, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 59 % of the time of 128 x 128 at 77, "
        "and at 16 keys (H200, h200-row-candidates-2.json)",
        max_keys=80,
    ),
    HopperChoice(
        128, 4096, False,
        replace(D128, forced_overlap=False, q_stages=3),
        "a third Q slot, since items are short: +11 % at 256 keys (H200, h200-row-candidates-2.json)",
        max_keys=256,
    ),
)  # fmt: skip
"""For queries over few keys, as of cross-attention."""
