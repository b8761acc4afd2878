"""The Hopper family's defaults by length: of batches without functions, with and without features."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.common_configs import (
    D64_SHORT,
    D64_TALL,
    D64_WIDE,
    D96,
    D128,
    D192_ONE_Q,
    D256,
    D256_CAUSAL,
    ONE_Q_SLOT,
    bf16_config,
)
from flash_helpers.kernels.hopper.forward.few_choices import (
    FEW_BLOCKS_CHOICES,
    FEW_KEYS_CHOICES,
    ONE_SMALL_TILE_CHOICES,
)
from flash_helpers.kernels.hopper.forward.next_item import NextItem

_D192_LONG_CAUSAL = HopperChoice(
    192, None, True,
    replace(D192_ONE_Q, B_c=112),
    "the widest tiles that fit beside one Q slot; others are ahead by at most 2 % at 4096 and 8192, "
    "level or behind at 16384 (H200)",
)  # fmt: skip

_D64_SHORT_BLOCKS = (
    HopperChoice(
        64, None, True,
        replace(D64_SHORT, kv_stages=4),
        "items are short, so that four of them are on their way: at 128 queries 56 % of the time of 256 x 64 "
        "(H200, h200-short-sequences.json)",
    ),
    HopperChoice(
        64, None, False,
        D64_SHORT,
        "items are short, so that four of them are on their way: at 128 queries 80 % of the time of 256 x "
        "64, 87 % with four stages (H200, h200-short-sequences.json)",
    ),
)  # fmt: skip

BY_LENGTH = (
    HopperChoice(
        64, 1024, True,
        replace(D64_TALL, trimmed=True, section_heads=64),
        "the upper warpgroups pass the tiles above the diagonal on: +8 % at 512, +10 % at 1024; sections of "
        "64 heads instead of 32: +1 and +2 %",
    ),
    HopperChoice(
        64, 4096, True,
        replace(D64_TALL, trimmed=True, section_heads=64),
        "as for short items: +9 % at 2048 and +6 % at 4096 over 192 x 128, whose blocks are the coarser",
    ),
    HopperChoice(
        64, 4096, False,
        D64_TALL,
        "four warpgroups read each K and V tile, six stages run far ahead: +3 % over 192 x 128 at 2048 and "
        "4096, which 192 does not divide; the next item's first product with the last P V keeps the tensor "
        "cores busy between items",
    ),
    HopperChoice(
        64, None, True,
        D64_WIDE,
        "as without a mask; a quarter of Q from registers, which saves reads of shared memory: +2 % at 8192, "
        "+2 to +3 % at 16384",
    ),
    HopperChoice(
        64, None, False,
        D64_WIDE,
        "wide tiles amortise the latency of a step, which is what bounds head size 64, and the turn goes on "
        "half way through P V (+2 to +4 % from 8192 on): together +3 % over 256 x 64 at 8192, +4 % at 16384; "
        "a quarter of Q from registers: +1 % at 8192, +2 % at 16384",
    ),
    *_D64_SHORT_BLOCKS,
    HopperChoice(
        128, 1024, True,
        replace(D128, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "short items end often: stores from registers free Q one step earlier",
    ),
    HopperChoice(
        128, 1024, False,
        replace(D128, next_item=NextItem.WITH_LAST_PV, paired_blocks=True),
        "the next item's first product with the last P V keeps the tensor cores busy between items; two "
        "blocks load each K and V tile for both: +1 %",
    ),
    HopperChoice(
        128, None, False,
        replace(D128, paired_blocks=True),
        "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; two "
        "blocks load each K and V tile for both: +1 to +3 %",
    ),
    HopperChoice(
        128, 4096, True,
        D128,
        "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; "
        "128 x 128 beats wider tiles at every length, which only tie at 16384",
    ),
    HopperChoice(
        128, None, True,
        replace(D128, section_heads=8),
        "as for shorter items; sections of 8 heads instead of 16: +2 % at 8192 and 16384 with pauses, "
        "0 and -1 % back to back (H200)",
    ),
    HopperChoice(
        256, 1024, True,
        replace(D256_CAUSAL, extra_k_stages=1, paired_blocks=True),
        "as for longer items; two blocks load each K and V tile for both, with a third K slot: +7 % at 512, "
        "+1 % at 1024 (with two: +4 % and nothing)",
    ),
    HopperChoice(
        256, 2048, True,
        replace(D256_CAUSAL, section_heads=16, paired_blocks=True),
        "as for longer items; sections of 16 heads instead of 32: +1 %; in pairs +0.6 %",
    ),
    HopperChoice(
        256, 4096, True,
        replace(D256_CAUSAL, paired_blocks=True),
        "shared memory holds one Q slot: stores from registers free it early; turns gain "
        "nothing here; tiles above the diagonal passed on: +1 to +2 % from 1024 on; two blocks load each K "
        "and V tile for both: +2 %",
    ),
    HopperChoice(
        256, 8192, True,
        replace(D256_CAUSAL, B_c=80, section_heads=16, paired_blocks=True),
        "as for shorter items, with 80 columns; two blocks load each K and V tile for both: +2 %",
    ),
    HopperChoice(
        256, None, True,
        replace(D256_CAUSAL, B_c=80, section_heads=8, paired_blocks=True),
        "fewer steps than with 64 columns: +0 to +1 %; sections of all 8 heads there are, and tiles above "
        "the diagonal passed on: +2 % at 16384; in pairs +3 % with pauses, -1 % back to back (H200)",
    ),
    HopperChoice(
        256, 4096, False,
        replace(D256, paired_blocks=True),
        "shared memory holds one Q slot: stores from registers free it early; turns gain "
        "nothing here; 64 columns are +1 % over 80 at 2048 and 4096; two blocks load each K and V tile "
        "for both: +1 %",
    ),
    HopperChoice(
        256, None, False,
        replace(D256, B_c=80, paired_blocks=True),
        "fewer steps than with 64 columns: +2 % at 8192; two blocks load each K and V tile for both: +3 %",
    ),
    HopperChoice(
        96, 2048, True,
        replace(D96, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "as for head size 128: the next item's first product with the last P V, and stores from registers: "
        "+6 % at 512, +2 % at 1024 and 2048 (H200)",
    ),
    HopperChoice(
        96, 1024, False,
        replace(D96, next_item=NextItem.WITH_LAST_PV),
        "as for head size 128: +4 % at 512, +2 % at 1024 over storing O first (H200)",
    ),
    HopperChoice(
        96, None, None,
        bf16_config(96, 192, 96, 2, 2, next_item=NextItem.WITH_LAST_PV),
        "three warpgroups read each tile and take turns: +7 to +11 % over 128 x 128 from 2048 on, under a "
        "causal mask +3 % at 4096, +9 and +10 % beyond (H200)",
    ),
    HopperChoice(
        192, 1024, True,
        replace(D192_ONE_Q, B_c=64, kv_stages=3, trimmed=True),
        "narrow tiles in three stages, and those above the diagonal passed on: +8 % at 512, +3 % at 1024 "
        "over 80 columns with two Q slots (H200)",
    ),
    HopperChoice(
        192, 2048, None,
        bf16_config(192, 128, 80, 2, 2, forced_overlap=True, next_item=NextItem.WITH_LAST_PV),
        "the widest tiles that leave room for two Q slots: over one slot and 96 or 112 columns +4 to +10 % "
        "without a mask, +1 to +4 % at 2048 with one (H200)",
    ),
    HopperChoice(
        192, None, False,
        replace(D192_ONE_Q, paired_blocks=True),
        "two blocks load each K and V tile for both: +1 % at 4096, +3 % at 8192, +2 % at 16384 over 112 "
        "columns alone (H200)",
    ),
    _D192_LONG_CAUSAL,
    HopperChoice(
        192, 2048, None,
        bf16_config(192, 128, 96, 2, 2, d_head_v=128, forced_overlap=True, next_item=NextItem.WITH_LAST_PV),
        "by its resources, for want of measurements: the widest tiles that leave room for two Q slots, which "
        "count most for short items",
        d_head_v=128,
    ),
    HopperChoice(
        192, None, None,
        bf16_config(192, 128, 128, 2, 1, d_head_v=128, **ONE_Q_SLOT),
        "by its resources, for want of measurements: the widest tiles that fit beside one Q slot",
        d_head_v=128,
    ),
)  # fmt: skip

_Place = tuple[int, int | None, bool | None]  # of a choice by length: head size, most queries, causal

_ALONE: dict[_Place, tuple[HopperChoice, ...]] = {
    (128, 4096, True): (
        HopperChoice(
            128, 2048, True,
            D128,
            "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; "
            "128 x 128 beats wider tiles at every length, which only tie at 16384",
        ),
        HopperChoice(
            128, 6144, True,
            replace(D128, next_item=NextItem.WITH_LAST_PV, q_register_steps=2),
            "a quarter of Q from registers, and the next item's first product with the last P V: +1 % at "
            "4090 and 4097; sections of 16 heads are +2 % over 8 at 4097 (H200, h200-rows-behind.json)",
        ),
    ),
    (192, None, True): (
        HopperChoice(
            192, 8192, True,
            replace(D192_ONE_Q, trimmed=True, q_register_steps=4),
            "a third of Q from registers, and tiles above the diagonal passed on: +2 % over 112 columns at "
            "4096, where two thirds and all of Q gain 1 % (H200, h200-rows-behind.json); at 8192 +1 % "
            "without registers (h200-head-sizes.json)",
        ),
        _D192_LONG_CAUSAL,
    ),
}  # fmt: skip
"""In the place of choices by length, for kernels of no feature but a causal mask, which leave Q registers."""

FEATURE_CHOICES = FEW_BLOCKS_CHOICES + FEW_KEYS_CHOICES + BY_LENGTH
"""For windows, sinks and padded heads."""

CHOICES = (
    *FEW_BLOCKS_CHOICES,
    *FEW_KEYS_CHOICES,
    *(new for old in BY_LENGTH for new in _ALONE.get((old.d_head, old.max_seq_len, old.causal), (old,))),
)

_CAPPED_D256: dict[_Place, HopperChoice] = {
    (256, 4096, False): HopperChoice(
        256, 4096, False, D256,
        "as without a soft cap, but not in pairs: +2 % at 4096 (H200, h200-short-sequences.json)",
    ),
    (256, 4096, True): HopperChoice(
        256, 4096, True, replace(D256_CAUSAL, paired_blocks=True, ping_pong=True),
        "as without a soft cap, but the softmax takes as long as the other warpgroup's products, so that "
        "turns gain: +4 % at 4096 (H200)",
    ),
}  # fmt: skip

CAPPED_CHOICES = (
    *FEW_BLOCKS_CHOICES,
    *(choice for choice in FEW_KEYS_CHOICES if choice.d_head == 64 and choice not in ONE_SMALL_TILE_CHOICES),
    HopperChoice(
        64, None, False, D64_TALL,
        "as without a soft cap up to 4096; 192 x 128 has no registers for a cap there, and takes twice the "
        "time at 2048 (H200)",
    ),
    *(choice for choice in BY_LENGTH if choice.d_head == 64 and choice.causal and choice.max_seq_len),
    HopperChoice(
        64, None, True, replace(D64_WIDE, q_register_steps=0),
        "as without a soft cap, whose registers a part of Q would take: +11 % at 8192 (H200)",
    ),
    *_D64_SHORT_BLOCKS,
    *(
        _CAPPED_D256.get((choice.d_head, choice.max_seq_len, choice.causal), choice)
        for choice in BY_LENGTH
        if choice.d_head != 64
    ),
)  # fmt: skip
"""For soft-capped scores."""
