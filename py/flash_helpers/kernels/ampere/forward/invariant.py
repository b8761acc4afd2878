"""The Ampere family's kernels of one numeric class a head size: what ``numerics="invariant"`` runs.

The tile of keys is the same on every GPU, so that it is one that the smallest shared memory has room for;
rows, warps and stages differ. Equal bits on different GPUs are not promised: instructions may round
differently.
"""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.defaults import Default
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.softmax import SoftmaxReference

KEY_TILES = {64: 64, 128: 32, 256: 32}
"""Head size of the kernel: keys of a tile."""

CHUNK_KEYS = 1280
"""Of a chunk. One sequence of 16384 keys, with 8 heads of K and V, then has as many chunks as an A100 has
multiprocessors, nearly; by the model both more and fewer take longer there."""

FEW_ROWS = 64  # of a block of four warps
MOST_STAGES = 4
TWO_BLOCKS = 2  # on an SM: one block's begin and end pass under the other's copies


def invariant_config(
    dtype: DType, d_head: int, n_rows: int, facts: DeviceFacts, tall_warps: bool = True
) -> FlashForwardKernelConfig:
    """The configuration of the class for blocks of up to ``n_rows`` rows.

    Of more than ``FEW_ROWS`` a warp has 32 rows at head size 64, and at 128 where two blocks of four such
    warps share an SM: half as many warps read K and V from shared memory. Else it has 16.

    Args:
        dtype: element type.
        d_head: head size of the kernel.
        n_rows: rows of a head.
        facts: the GPU.
        tall_warps: registers have room for warps of 32 rows at these head sizes.
    """
    few = n_rows <= FEW_ROWS
    config = FlashForwardKernelConfig(
        dtype=dtype,
        d_head=d_head,
        B_r=FEW_ROWS if few else 128,
        B_c=KEY_TILES[d_head],
        n_warps=4 if few or (d_head <= 128 and tall_warps) else 8,
        async_copy=True,
        eager_load_blocks=True,
        swizzled=True,
        Q_mma_load_K_tiles=1,
        K_mma_load_K_tiles=1,
        V_mma_load_K_tiles=1,
        mma_double_buffer_loads=False,
        optimized_softmax=True,
        softmax_reference=SoftmaxReference.EXACT_SKIP_RESCALE,
        fragments_ahead=1,
        chunk_tiles=CHUNK_KEYS // KEY_TILES[d_head],
    )
    for blocks in (TWO_BLOCKS, 1):
        if blocks == 1 and not few and d_head == 128:
            config = replace(config, n_warps=8)
        for kv_stages in range(MOST_STAGES, 1, -1):
            staged = replace(config, kv_stages=kv_stages, mbarrier=True)
            if blocks * (staged.smem_bytes() + facts.smem_reserved_per_block) <= facts.smem_per_sm:
                return staged
    return config


def invariant_choice(
    problem: AttentionProblem, d_head: int, facts: DeviceFacts, in_parts: bool = False
) -> Default:
    """The configuration of the class for a problem, with the reason.

    Args:
        problem: the problem as the kernel is given it.
        d_head: head size of the kernel.
        facts: the GPU.
        in_parts: keys are cut into parts.
    """
    # What takes the registers of warps of 32 rows, of which head size 128 has fewer to spare.
    crowded = in_parts or problem.planned or problem.features()["window"]
    if d_head > 64:
        crowded |= problem.paged or problem.softcap
    config = invariant_config(problem.dtype, d_head, problem.rows_of_sequence, facts, not crowded)
    return config, f"tiles of {config.B_c} keys, which every GPU has room for"
