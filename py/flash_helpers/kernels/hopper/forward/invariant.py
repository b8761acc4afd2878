"""The Hopper family's kernels of one numeric class a head size: what ``numerics="invariant"`` runs.

Of a head size all have the same tile of keys and the same softmax, whatever they are for; a test compares
their classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flash_helpers.kernels.defaults import Default, are_filled
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.softmax import SoftmaxReference

FEW_ROWS = 64  # of one warpgroup
LONG_KEYS = 8192  # of sequences that take `InvariantConfigs.long`
CHUNK_KEYS = 2048  # of a chunk, or a few more, where tiles do not divide them


@dataclass(frozen=True)
class InvariantConfigs:
    """The configurations of one head size, in BF16.

    Attributes:
        few: for up to ``FEW_ROWS`` rows a head, and where blocks of so many rows all find an SM of their own:
            all shared memory for tiles on their way.
        many: for more.
        long: the same for sequences of ``LONG_KEYS`` keys and more, where chunks end often.
        packed: the same for sequences of different lengths and for soft caps, which take registers, and where
            taller blocks would be partly empty.
        reason: why these.
    """

    few: HopperForwardKernelConfig
    many: HopperForwardKernelConfig
    long: HopperForwardKernelConfig
    packed: HopperForwardKernelConfig
    reason: str


def _config(
    sizes: tuple[int, int], B_r: int, B_c: int, kv_stages: int, q_stages: int, **changes: Any
) -> HopperForwardKernelConfig:
    base = HopperForwardKernelConfig(
        dtype=DType.BF16,
        d_head=sizes[0],
        d_head_v=sizes[1],
        B_r=B_r,
        B_c=B_c,
        kv_stages=kv_stages,
        q_stages=q_stages,
        overlap_products=True,
        ping_pong=B_r > FEW_ROWS and q_stages > 1,
        softmax_reference=SoftmaxReference.LAGGED_BY_ROW,
        forced_overlap=True,
        next_item=NextItem.NONE,
        direct_store=q_stages == 1,
        dynamic_schedule=False,
        head_sections=True,
        chunk_tiles=-(-CHUNK_KEYS // B_c),
    )
    return replace(base, **changes)


def _configs(
    sizes: tuple[int, int],
    B_c: int,
    stages_of_few: int,
    many: dict[str, Any],
    packed: dict[str, Any],
    reason: str,
    long: dict[str, Any] | None = None,
) -> tuple[tuple[int, int], InvariantConfigs]:
    two = {"B_r": 128, "kv_stages": 2, "q_stages": 2}
    return sizes, InvariantConfigs(
        _config(sizes, FEW_ROWS, B_c, stages_of_few, 1),
        _config(sizes, **{**two, "B_c": B_c, **many}),
        _config(sizes, **{**two, "B_c": B_c, **many, **(long or {})}),
        _config(sizes, **{**two, "B_c": B_c, **packed}),
        reason,
    )


_AFTER, _WITH = {"next_item": NextItem.AFTER_LAST_PV}, {"next_item": NextItem.WITH_LAST_PV}
_TALL = {"B_r": 256, "kv_stages": 6, "forced_overlap": False, "trimmed": True, "section_heads": 64}
_ONE_Q = {"q_stages": 1}
_ROOM_FOR_CHUNKS = {"q_stages": 1, "next_item": NextItem.NONE, "ping_pong": True}  # in shared memory

INVARIANT: dict[tuple[int, int], InvariantConfigs] = dict(
    (
        _configs(
            (64, 64), 64, 8,
            {**_TALL, **_WITH},
            {"kv_stages": 6, **_WITH},
            "tiles of 64 keys, which prompts take anyway",
        ),
        _configs(
            (96, 96), 128, 3, _AFTER, _AFTER, "tiles of 128 keys, as decoding and short prompts take anyway"
        ),
        _configs(
            (128, 128), 128, 3, _AFTER, _AFTER, "tiles of 128 keys, as decoding and prompts take anyway",
            _ROOM_FOR_CHUNKS,
        ),
        _configs(
            (192, 192), 96, 2, _ONE_Q, _ONE_Q,
            "tiles of 96 keys, the widest of which two stages leave room for 128 rows and for 64",
        ),
        _configs((192, 128), 96, 3, _WITH, _WITH, "tiles of 96 keys, which prompts take anyway"),
        _configs((256, 256), 64, 3, _ONE_Q, _ONE_Q, "tiles of 64 keys, as decoding and prompts take anyway"),
    )
)  # fmt: skip
"""(d_head, d_head_v) of the kernels: their configurations."""


def invariant_choice(problem: AttentionProblem, sizes: tuple[int, int], few_blocks: bool) -> Default:
    """The configuration of the class for a problem.

    Args:
        problem: the problem as the kernel is given it.
        sizes: head sizes of the kernel.
        few_blocks: blocks of ``FEW_ROWS`` rows all find an SM of their own.
    """
    configs = INVARIANT[sizes]
    rows = problem.rows_of_sequence
    config = configs.long if problem.seq_len_k >= LONG_KEYS else configs.many
    if problem.varlen or problem.softcap:
        config = configs.packed
    if rows <= FEW_ROWS or few_blocks:
        config = configs.few
    elif not are_filled(rows, config.B_r, (configs.packed.B_r,)):
        config = configs.packed
    uneven = problem.masked or problem.varlen
    once = problem.reads_keys_once(FEW_ROWS)
    config = replace(config, dtype=problem.dtype, dynamic_schedule=uneven, keys_once=once)
    return config, configs.reason
