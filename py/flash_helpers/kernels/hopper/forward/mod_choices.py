"""The Hopper family's defaults for functions of the user's, of sequences of one length."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.common_configs import D64_TALL, D64_TWO_GROUPS, D64_WIDE, D128
from flash_helpers.kernels.hopper.forward.varlen_choices import VARLEN_CHOICES

MOD_CHOICES = (
    HopperChoice(
        64, None, None, D64_TALL,
        "by its registers: a tile of 64 columns leaves some to a function of the user's, 192 x 128 spills",
    ),
    HopperChoice(
        64, None, None, D64_TWO_GROUPS,
        "by its registers, too: as for functions that read rows ahead",
    ),
    *(choice for choice in VARLEN_CHOICES if choice.d_head != 64),
)  # fmt: skip
"""For functions of the user's, of sequences of one length."""

STEP_CHOICES = (
    HopperChoice(
        64, 1024, None, D64_TALL,
        "as for other functions: +4 % over 192 x 128 (H200)",
    ),
    HopperChoice(
        64, None, None, replace(D64_WIDE, q_register_steps=0),
        "wide tiles, as without functions: what grows evenly takes no registers; over 256 x 64 +1 to +2 % at "
        "2048 and 4096, +14 % at 16384, under a causal mask +2 and +4 % at 2048 and 4096 (H200)",
    ),
    *MOD_CHOICES,
)  # fmt: skip
"""For functions that add to a score what grows evenly with the distance (``flash_helpers.mods.added``)."""

STREAM_CHOICES = (
    HopperChoice(
        64, None, None, D64_TWO_GROUPS,
        "by its registers: those of two warpgroups hold what is read of a bias while the product runs",
    ),
    *(choice for choice in MOD_CHOICES if choice.d_head != 64),
)  # fmt: skip
"""For functions that read rows of a captured tensor ahead (``flash_helpers.mods.ahead``)."""

COPIED_CHOICES = (
    HopperChoice(
        64, None, False, D64_TALL,
        "four warpgroups read each K and V tile, which shared memory has to bring beside a bias: +6 % over "
        "128 x 128 at 1024, +16 % at 4096, +18 % at 16384 (H200, h200-mods-bias.json)",
    ),
    HopperChoice(
        128, 1024, True, D128,
        "as for longer items, by its registers: beside stores of O from them products wait for each other",
    ),
    HopperChoice(
        128, 1024, False, replace(D128, paired_blocks=True),
        "two blocks load each K and V tile for both, which the L2 cache has to bring beside a bias: +9 % at "
        "1024; nothing at 4096, -1 % at 16384 (H200, h200-mods-bias.json)",
    ),
    *(
        replace(choice, config=replace(choice.config, paired_blocks=False))
        for choice in STREAM_CHOICES
        if (choice.d_head, choice.max_seq_len) != (128, 1024)
    ),
)  # fmt: skip
"""For functions of a captured tensor whose tiles copies bring (``flash_helpers.mods.ahead.copied_load``)."""
