"""The Ampere family's kernels of one numeric class a head size: what ``numerics="invariant"`` runs.

The tile of keys is the same on every GPU, so that it is one that the smallest shared memory has room for;
rows and stages differ. Equal bits on different GPUs are not promised: instructions may round differently.
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

FEW_ROWS = 64  # of a block of four warps
MOST_STAGES = 4
TWO_BLOCKS = 2  # on an SM: one block's begin and end pass under the other's copies


def invariant_config(dtype: DType, d_head: int, n_rows: int, facts: DeviceFacts) -> FlashForwardKernelConfig:
    """The configuration of the class for blocks of up to ``n_rows`` rows.

    A warp has 16 rows, but 32 at head size 64, where registers have room for them.

    Args:
        dtype: element type.
        d_head: head size of the kernel.
        n_rows: rows of a head.
        facts: the GPU.
    """
    few = n_rows <= FEW_ROWS
    config = FlashForwardKernelConfig(
        dtype=dtype,
        d_head=d_head,
        B_r=FEW_ROWS if few else 128,
        B_c=KEY_TILES[d_head],
        n_warps=4 if few or d_head == 64 else 8,
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
    )
    for blocks in (TWO_BLOCKS, 1):
        for kv_stages in range(MOST_STAGES, 1, -1):
            staged = replace(config, kv_stages=kv_stages, mbarrier=True)
            if blocks * (staged.smem_bytes() + facts.smem_reserved_per_block) <= facts.smem_per_sm:
                return staged
    return config


def invariant_choice(problem: AttentionProblem, d_head: int, facts: DeviceFacts) -> Default:
    """The configuration of the class for a problem, with the reason.

    Args:
        problem: the problem as the kernel is given it.
        d_head: head size of the kernel.
        facts: the GPU.
    """
    config = invariant_config(problem.dtype, d_head, problem.rows_of_sequence, facts)
    return config, f"tiles of {config.B_c} keys, which every GPU has room for"
