"""The Hopper family's defaults for sequences of different lengths, and for keys in parts."""

from __future__ import annotations

from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.choices import BY_LENGTH
from flash_helpers.kernels.hopper.forward.common_configs import (
    D64_TALL,
    D64_TWO_GROUPS,
    D64_WIDE,
    D96,
    D256,
    ONE_Q_SLOT,
    bf16_config,
)

VARLEN_CHOICES = (
    HopperChoice(
        64, None, None,
        D64_TWO_GROUPS,
        "by its resources, for want of measurements: three and four consumers leave the load warp too few "
        "registers to find sequences",
    ),
    HopperChoice(
        96, None, None,
        D96,
        "by its resources, for want of measurements: as for head size 64, three consumers leave the load "
        "warp too few registers",
    ),
    *(choice for choice in BY_LENGTH if choice.d_head not in (64, 96)),
)  # fmt: skip
"""For sequences of different lengths, in the cache or with features, and for functions of the user's."""

PACKED_CHOICES = (
    HopperChoice(
        64, None, False, D64_TALL,
        "taller blocks, whose load warp spills outside of its loop alone: +20 % over 128 x 128 with lengths "
        "from 33 to 4096 (H200)",
    ),
    HopperChoice(
        64, None, True, D64_WIDE,
        "taller blocks, whose load warp spills outside of its loop alone: +12 % over 128 x 128 with lengths "
        "from 33 to 4096 (H200)",
    ),
    *VARLEN_CHOICES,
)  # fmt: skip
"""For sequences of different lengths without other features than a causal mask."""

MAX_SHORT_QUERIES = 64  # rows of one warpgroup

SPLIT_CHOICES = tuple(
    HopperChoice(
        d_head, MAX_SHORT_QUERIES, None,
        bf16_config(d_head, 64, B_c, kv_stages, 1, d_head_v=d_head_v, **ONE_Q_SLOT),
        "few queries over many keys wait for DRAM alone; one warpgroup of rows, all shared memory for tiles"
        " on their way" + "; 64 keys in 4 or 6 stages are within 1 % from 4096 keys on" * (d_head == 128),
        d_head_v=d_head_v,
    )
    for d_head, d_head_v, B_c, kv_stages in (
        (64, 64, 128, 6), (96, 96, 128, 3), (128, 128, 128, 3), (192, 192, 64, 4), (192, 128, 64, 4),
        (256, 256, 64, 3),
    )
) + VARLEN_CHOICES  # fmt: skip
"""For keys that are shared by several thread blocks."""

PLANNED_CHOICES = (
    *(choice for choice in SPLIT_CHOICES if choice.max_seq_len == MAX_SHORT_QUERIES),
    HopperChoice(
        256, None, None, D256,
        "by its registers, for want of measurements: wider tiles leave too few to a warp that plans",
    ),
    *SPLIT_CHOICES,
)  # fmt: skip
"""For packed queries over a cache, where rows are queries times grouped heads."""
