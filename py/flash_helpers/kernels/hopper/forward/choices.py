"""The Hopper family's default configuration for each range of problems, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import (
    WARPGROUP_ROWS,
    HopperForwardKernelConfig,
    NextItem,
)
from flash_helpers.kernels.softmax import SoftmaxReference


def _config(
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


@dataclass(frozen=True)
class HopperChoice:
    """The default configuration of a range of problems: what runs unless tuning has found a faster one.

    Attributes:
        d_head: head size.
        max_seq_len: up to this many queries; None: any number.
        causal: for causal problems only, for others only, or (None) for both.
        config: in BF16; with a counter where the mask is causal (``choose_hopper_kernel`` sets it).
        reason: why, with what it was measured on: one H100 80GB HBM3 (2026-11-27 and 28), bf16, 16384 tokens,
            hidden size 2048, cards hot; "(H200)": on one H200,
            h200-head-sizes.json, h200-long.json, and of few blocks, few keys, packed sequences and soft caps
            benchmarks/results/h200-row-candidates.json and -2, and h200-short-sequences.json, which
            benchmarks/row_candidates.py makes.
            Figures are those of the files benchmarks/results/h100-hopper-variants-*.json and, about pairs and
            Q in registers, h100-hopper-pairs.json; what steps gain is in the ladder. Where nothing was
            measured it says so.
        d_head_v: head size of V; None: ``d_head``.
        max_keys: up to this many keys; None: any number.
        few_blocks_of: for problems whose blocks of so many queries all find an SM of their own; None: any.
    """

    d_head: int
    max_seq_len: int | None
    causal: bool | None
    config: HopperForwardKernelConfig
    reason: str
    d_head_v: int | None = None
    max_keys: int | None = None
    few_blocks_of: int | None = None

    def fits(
        self,
        d_head: int,
        d_head_v: int,
        causal: bool,
        seq_len: int,
        n_keys: int | None = None,
        few_blocks_of: int | None = None,
    ) -> bool:
        """Whether it was made for such a problem.

        Args:
            n_keys: None where the number is not known.
            few_blocks_of: the least number of queries whose blocks all find an SM of their own; None: none.
        """
        if self.few_blocks_of is not None and (few_blocks_of is None or few_blocks_of > self.few_blocks_of):
            return False
        if self.max_keys is not None and (n_keys is None or n_keys > self.max_keys):
            return False
        return (
            self.d_head == d_head
            and (self.d_head_v or self.d_head) == d_head_v
            and self.causal in (None, causal)
            and (self.max_seq_len is None or seq_len <= self.max_seq_len)
        )


# What the choices of a head size have in common; each says what it changes.
_D64_TALL = _config(64, 256, 64, 6, 2, next_item=NextItem.WITH_LAST_PV)
_D64_WIDE = _config(64, 192, 128, 2, 2, next_item=NextItem.WITH_LAST_PV, early_pass=True, q_register_steps=1)
_D64_SHORT = _config(64, 128, 128, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True)
_D64_TWO_GROUPS = _config(64, 128, 128, 2, 2, next_item=NextItem.WITH_LAST_PV)
_D128 = _config(128, 128, 128, 2, 2, forced_overlap=True, next_item=NextItem.AFTER_LAST_PV)
_D96 = replace(_D128, d_head=96, d_head_v=96)
_ONE_Q_SLOT = dict(ping_pong=False, forced_overlap=True, direct_store=True)
_D192_ONE_Q = _config(192, 128, 96, 2, 1, **_ONE_Q_SLOT)
_D256 = _config(256, 128, 64, 2, 1, **_ONE_Q_SLOT)
_D256_CAUSAL = replace(_D256, trimmed=True)

_FEW = "one block of 64 queries an SM, where blocks of 128 leave half of the SMs idle: "
FEW_BLOCKS_CHOICES = (
    HopperChoice(
        64, None, None, _config(64, 64, 128, 4, 1, ping_pong=False, direct_store=True),
        _FEW + "a third of the time of 256 rows, three quarters of that of 128 at 1024 keys (H200)",
        max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        64, None, None, _config(64, 128, 128, 4, 1, direct_store=True),
        "one block of 128 queries an SM, where taller blocks leave SMs idle: two thirds of the time of 256 x "
        "64 at 1024 keys and 16 heads (H200, h200-short-sequences.json)",
        few_blocks_of=128,
    ),
    HopperChoice(
        96, None, None, _config(96, 64, 128, 3, 1, **_ONE_Q_SLOT),
        _FEW + "as for head sizes 64, 128 and 256, for want of measurements", max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        128, None, None, _config(128, 64, 128, 3, 1, **_ONE_Q_SLOT),
        _FEW + "two thirds of the time of 128 rows at 512 keys, a third of that of 128 rows with keys in "
        "parts at 1024 (H200)", max_keys=2048, few_blocks_of=64,
    ),
    HopperChoice(
        128, 2048, None, replace(_D128, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "one block an SM has no next item, and starts sooner where it is no cluster: +3 % at 2048, +1 % "
        "under a causal mask (H200)", max_keys=2048, few_blocks_of=128,
    ),
    *(
        HopperChoice(
            192, None, None, _config(192, 64, 64, 3, 1, d_head_v=d_head_v, **_ONE_Q_SLOT),
            _FEW + "as for head sizes 64, 128 and 256, for want of measurements",
            d_head_v=d_head_v, max_keys=2048, few_blocks_of=64,
        )
        for d_head_v in (None, 128)
    ),
    HopperChoice(
        256, None, None, _config(256, 64, 64, 2, 1, ping_pong=False, direct_store=True),
        _FEW + "two thirds of the time of 128 rows at 1024 keys (H200)", max_keys=2048, few_blocks_of=64,
    ),
)  # fmt: skip
"""For problems that leave SMs idle."""

ONE_SMALL_TILE_CHOICES = tuple(
    HopperChoice(
        d_head, WARPGROUP_ROWS, None,
        _config(
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
        _config(64, 192, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 55 % of the time of 256 x 64 at 77 keys, "
        "60 % at 16 (H200)",
        max_keys=80,
    ),
    HopperChoice(
        64, None, False,
        _config(64, 128, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 7 % behind 192 x 80 at 4096 queries",
        max_keys=80,
    ),
    HopperChoice(
        64, 4096, False,
        replace(_D64_TALL, q_stages=3),
        "a third Q slot, since items are short: +6 % at 256 keys (H200)",
        max_keys=256,
    ),
    HopperChoice(
        128, None, False,
        _config(128, 128, 80, 2, 4, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "all keys are one tile, and four Q slots keep memory busy: 59 % of the time of 128 x 128 at 77, "
        "and at 16 keys (H200, h200-row-candidates-2.json)",
        max_keys=80,
    ),
    HopperChoice(
        128, 4096, False,
        replace(_D128, forced_overlap=False, q_stages=3),
        "a third Q slot, since items are short: +11 % at 256 keys (H200, h200-row-candidates-2.json)",
        max_keys=256,
    ),
)  # fmt: skip
"""For queries over few keys, as of cross-attention."""

_D192_LONG_CAUSAL = HopperChoice(
    192, None, True,
    replace(_D192_ONE_Q, B_c=112),
    "the widest tiles that fit beside one Q slot; others are ahead by at most 2 % at 4096 and 8192, "
    "level or behind at 16384 (H200)",
)  # fmt: skip

_D64_SHORT_BLOCKS = (
    HopperChoice(
        64, None, True,
        replace(_D64_SHORT, kv_stages=4),
        "items are short, so that four of them are on their way: at 128 queries 56 % of the time of 256 x 64 "
        "(H200, h200-short-sequences.json)",
    ),
    HopperChoice(
        64, None, False,
        _D64_SHORT,
        "items are short, so that four of them are on their way: at 128 queries 80 % of the time of 256 x "
        "64, 87 % with four stages (H200, h200-short-sequences.json)",
    ),
)  # fmt: skip

_BY_LENGTH = (
    HopperChoice(
        64, 1024, True,
        replace(_D64_TALL, trimmed=True, section_heads=64),
        "the upper warpgroups pass the tiles above the diagonal on: +8 % at 512, +10 % at 1024; sections of "
        "64 heads instead of 32: +1 and +2 %",
    ),
    HopperChoice(
        64, 4096, True,
        replace(_D64_TALL, trimmed=True, section_heads=64),
        "as for short items: +9 % at 2048 and +6 % at 4096 over 192 x 128, whose blocks are the coarser",
    ),
    HopperChoice(
        64, 4096, False,
        _D64_TALL,
        "four warpgroups read each K and V tile, six stages run far ahead: +3 % over 192 x 128 at 2048 and "
        "4096, which 192 does not divide; the next item's first product with the last P V keeps the tensor "
        "cores busy between items",
    ),
    HopperChoice(
        64, None, True,
        _D64_WIDE,
        "as without a mask; a quarter of Q from registers, which saves reads of shared memory: +2 % at 8192, "
        "+2 to +3 % at 16384",
    ),
    HopperChoice(
        64, None, False,
        _D64_WIDE,
        "wide tiles amortise the latency of a step, which is what bounds head size 64, and the turn goes on "
        "half way through P V (+2 to +4 % from 8192 on): together +3 % over 256 x 64 at 8192, +4 % at 16384; "
        "a quarter of Q from registers: +1 % at 8192, +2 % at 16384",
    ),
    *_D64_SHORT_BLOCKS,
    HopperChoice(
        128, 1024, True,
        replace(_D128, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "short items end often: stores from registers free Q one step earlier",
    ),
    HopperChoice(
        128, 1024, False,
        replace(_D128, next_item=NextItem.WITH_LAST_PV, paired_blocks=True),
        "the next item's first product with the last P V keeps the tensor cores busy between items; two "
        "blocks load each K and V tile for both: +1 %",
    ),
    HopperChoice(
        128, None, False,
        replace(_D128, paired_blocks=True),
        "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; two "
        "blocks load each K and V tile for both: +1 to +3 %",
    ),
    HopperChoice(
        128, 4096, True,
        _D128,
        "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; "
        "128 x 128 beats wider tiles at every length, which only tie at 16384",
    ),
    HopperChoice(
        128, None, True,
        replace(_D128, section_heads=8),
        "as for shorter items; sections of 8 heads instead of 16: +2 % at 8192 and 16384 with pauses, "
        "0 and -1 % back to back (H200)",
    ),
    HopperChoice(
        256, 1024, True,
        replace(_D256_CAUSAL, extra_k_stages=1, paired_blocks=True),
        "as for longer items; two blocks load each K and V tile for both, with a third K slot: +7 % at 512, "
        "+1 % at 1024 (with two: +4 % and nothing)",
    ),
    HopperChoice(
        256, 2048, True,
        replace(_D256_CAUSAL, section_heads=16, paired_blocks=True),
        "as for longer items; sections of 16 heads instead of 32: +1 %; in pairs +0.6 %",
    ),
    HopperChoice(
        256, 4096, True,
        replace(_D256_CAUSAL, paired_blocks=True),
        "shared memory holds one Q slot: stores from registers free it early; turns gain "
        "nothing here; tiles above the diagonal passed on: +1 to +2 % from 1024 on; two blocks load each K "
        "and V tile for both: +2 %",
    ),
    HopperChoice(
        256, 8192, True,
        replace(_D256_CAUSAL, B_c=80, section_heads=16, paired_blocks=True),
        "as for shorter items, with 80 columns; two blocks load each K and V tile for both: +2 %",
    ),
    HopperChoice(
        256, None, True,
        replace(_D256_CAUSAL, B_c=80, section_heads=8, paired_blocks=True),
        "fewer steps than with 64 columns: +0 to +1 %; sections of all 8 heads there are, and tiles above "
        "the diagonal passed on: +2 % at 16384; in pairs +3 % with pauses, -1 % back to back (H200)",
    ),
    HopperChoice(
        256, 4096, False,
        replace(_D256, paired_blocks=True),
        "shared memory holds one Q slot: stores from registers free it early; turns gain "
        "nothing here; 64 columns are +1 % over 80 at 2048 and 4096; two blocks load each K and V tile "
        "for both: +1 %",
    ),
    HopperChoice(
        256, None, False,
        replace(_D256, B_c=80, paired_blocks=True),
        "fewer steps than with 64 columns: +2 % at 8192; two blocks load each K and V tile for both: +3 %",
    ),
    HopperChoice(
        96, 2048, True,
        replace(_D96, next_item=NextItem.WITH_LAST_PV, direct_store=True),
        "as for head size 128: the next item's first product with the last P V, and stores from registers: "
        "+6 % at 512, +2 % at 1024 and 2048 (H200)",
    ),
    HopperChoice(
        96, 1024, False,
        replace(_D96, next_item=NextItem.WITH_LAST_PV),
        "as for head size 128: +4 % at 512, +2 % at 1024 over storing O first (H200)",
    ),
    HopperChoice(
        96, None, None,
        _config(96, 192, 96, 2, 2, next_item=NextItem.WITH_LAST_PV),
        "three warpgroups read each tile and take turns: +7 to +11 % over 128 x 128 from 2048 on, under a "
        "causal mask +3 % at 4096, +9 and +10 % beyond (H200)",
    ),
    HopperChoice(
        192, 1024, True,
        replace(_D192_ONE_Q, B_c=64, kv_stages=3, trimmed=True),
        "narrow tiles in three stages, and those above the diagonal passed on: +8 % at 512, +3 % at 1024 "
        "over 80 columns with two Q slots (H200)",
    ),
    HopperChoice(
        192, 2048, None,
        _config(192, 128, 80, 2, 2, forced_overlap=True, next_item=NextItem.WITH_LAST_PV),
        "the widest tiles that leave room for two Q slots: over one slot and 96 or 112 columns +4 to +10 % "
        "without a mask, +1 to +4 % at 2048 with one (H200)",
    ),
    HopperChoice(
        192, None, False,
        replace(_D192_ONE_Q, paired_blocks=True),
        "two blocks load each K and V tile for both: +1 % at 4096, +3 % at 8192, +2 % at 16384 over 112 "
        "columns alone (H200)",
    ),
    _D192_LONG_CAUSAL,
    HopperChoice(
        192, 2048, None,
        _config(192, 128, 96, 2, 2, d_head_v=128, forced_overlap=True, next_item=NextItem.WITH_LAST_PV),
        "by its resources, for want of measurements: the widest tiles that leave room for two Q slots, which "
        "count most for short items",
        d_head_v=128,
    ),
    HopperChoice(
        192, None, None,
        _config(192, 128, 128, 2, 1, d_head_v=128, **_ONE_Q_SLOT),
        "by its resources, for want of measurements: the widest tiles that fit beside one Q slot",
        d_head_v=128,
    ),
)  # fmt: skip

_Place = tuple[int, int | None, bool | None]  # of a choice by length: head size, most queries, causal

_ALONE: dict[_Place, tuple[HopperChoice, ...]] = {
    (128, 4096, True): (
        HopperChoice(
            128, 2048, True,
            _D128,
            "O is stored under the next item's first product, which from 2048 on is ahead of next_with_pv; "
            "128 x 128 beats wider tiles at every length, which only tie at 16384",
        ),
        HopperChoice(
            128, 6144, True,
            replace(_D128, next_item=NextItem.WITH_LAST_PV, q_register_steps=2),
            "a quarter of Q from registers, and the next item's first product with the last P V: +1 % at "
            "4090 and 4097; sections of 16 heads are +2 % over 8 at 4097 (H200, h200-rows-behind.json)",
        ),
    ),
    (192, None, True): (
        HopperChoice(
            192, 8192, True,
            replace(_D192_ONE_Q, trimmed=True, q_register_steps=4),
            "a third of Q from registers, and tiles above the diagonal passed on: +2 % over 112 columns at "
            "4096, where two thirds and all of Q gain 1 % (H200, h200-rows-behind.json); at 8192 +1 % "
            "without registers (h200-head-sizes.json)",
        ),
        _D192_LONG_CAUSAL,
    ),
}  # fmt: skip
"""In the place of choices by length, for kernels of no feature but a causal mask, which leave Q registers."""

FEATURE_CHOICES = FEW_BLOCKS_CHOICES + FEW_KEYS_CHOICES + _BY_LENGTH
"""For windows, sinks and padded heads."""

CHOICES = (
    *FEW_BLOCKS_CHOICES,
    *FEW_KEYS_CHOICES,
    *(new for old in _BY_LENGTH for new in _ALONE.get((old.d_head, old.max_seq_len, old.causal), (old,))),
)

_CAPPED_D256: dict[_Place, HopperChoice] = {
    (256, 4096, False): HopperChoice(
        256, 4096, False, _D256,
        "as without a soft cap, but not in pairs: +2 % at 4096 (H200, h200-short-sequences.json)",
    ),
    (256, 4096, True): HopperChoice(
        256, 4096, True, replace(_D256_CAUSAL, paired_blocks=True, ping_pong=True),
        "as without a soft cap, but the softmax takes as long as the other warpgroup's products, so that "
        "turns gain: +4 % at 4096 (H200)",
    ),
}  # fmt: skip

CAPPED_CHOICES = (
    *FEW_BLOCKS_CHOICES,
    *(choice for choice in FEW_KEYS_CHOICES if choice.d_head == 64 and choice not in ONE_SMALL_TILE_CHOICES),
    HopperChoice(
        64, None, False, _D64_TALL,
        "as without a soft cap up to 4096; 192 x 128 has no registers for a cap there, and takes twice the "
        "time at 2048 (H200)",
    ),
    *(choice for choice in _BY_LENGTH if choice.d_head == 64 and choice.causal and choice.max_seq_len),
    HopperChoice(
        64, None, True, replace(_D64_WIDE, q_register_steps=0),
        "as without a soft cap, whose registers a part of Q would take: +11 % at 8192 (H200)",
    ),
    *_D64_SHORT_BLOCKS,
    *(
        _CAPPED_D256.get((choice.d_head, choice.max_seq_len, choice.causal), choice)
        for choice in _BY_LENGTH
        if choice.d_head != 64
    ),
)  # fmt: skip
"""For soft-capped scores."""

VARLEN_CHOICES = (
    HopperChoice(
        64, None, None,
        _D64_TWO_GROUPS,
        "by its resources, for want of measurements: three and four consumers leave the load warp too few "
        "registers to find sequences",
    ),
    HopperChoice(
        96, None, None,
        _D96,
        "by its resources, for want of measurements: as for head size 64, three consumers leave the load "
        "warp too few registers",
    ),
    *(choice for choice in _BY_LENGTH if choice.d_head not in (64, 96)),
)  # fmt: skip
"""For sequences of different lengths, in the cache or with features, and for functions of the user's."""

MOD_CHOICES = (
    HopperChoice(
        64, None, None, _D64_TALL,
        "by its registers: a tile of 64 columns leaves some to a function of the user's, 192 x 128 spills",
    ),
    HopperChoice(
        64, None, None, _D64_TWO_GROUPS,
        "by its registers, too: as for functions that read rows ahead",
    ),
    *(choice for choice in VARLEN_CHOICES if choice.d_head != 64),
)  # fmt: skip
"""For functions of the user's, of sequences of one length."""

STEP_CHOICES = (
    HopperChoice(
        64, 1024, None, _D64_TALL,
        "as for other functions: +4 % over 192 x 128 (H200)",
    ),
    HopperChoice(
        64, None, None, replace(_D64_WIDE, q_register_steps=0),
        "wide tiles, as without functions: what grows evenly takes no registers; over 256 x 64 +1 to +2 % at "
        "2048 and 4096, +14 % at 16384, under a causal mask +2 and +4 % at 2048 and 4096 (H200)",
    ),
    *MOD_CHOICES,
)  # fmt: skip
"""For functions that add to a score what grows evenly with the distance (``flash_helpers.mods.added``)."""

STREAM_CHOICES = (
    HopperChoice(
        64, None, None, _D64_TWO_GROUPS,
        "by its registers: those of two warpgroups hold what is read of a bias while the product runs",
    ),
    *(choice for choice in MOD_CHOICES if choice.d_head != 64),
)  # fmt: skip
"""For functions that read rows of a captured tensor ahead (``flash_helpers.mods.ahead``)."""

COPIED_CHOICES = (
    HopperChoice(
        64, None, False, _D64_TALL,
        "four warpgroups read each K and V tile, which shared memory has to bring beside a bias: +6 % over "
        "128 x 128 at 1024, +16 % at 4096, +18 % at 16384 (H200, h200-mods-bias.json)",
    ),
    HopperChoice(
        128, 1024, True, _D128,
        "as for longer items, by its registers: beside stores of O from them products wait for each other",
    ),
    HopperChoice(
        128, 1024, False, replace(_D128, paired_blocks=True),
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

PACKED_CHOICES = (
    HopperChoice(
        64, None, False, _D64_TALL,
        "taller blocks, whose load warp spills outside of its loop alone: +20 % over 128 x 128 with lengths "
        "from 33 to 4096 (H200)",
    ),
    HopperChoice(
        64, None, True, _D64_WIDE,
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
        _config(d_head, 64, B_c, kv_stages, 1, d_head_v=d_head_v, **_ONE_Q_SLOT),
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
        256, None, None, _D256,
        "by its registers, for want of measurements: wider tiles leave too few to a warp that plans",
    ),
    *SPLIT_CHOICES,
)  # fmt: skip
"""For packed queries over a cache, where rows are queries times grouped heads."""
