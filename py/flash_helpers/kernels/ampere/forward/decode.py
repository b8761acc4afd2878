"""The Ampere family's configurations for few queries against many keys: K and V are read once, at full rate.

A block of 64 queries and four warps is the smallest there is. One query a head, with the heads of its group
as rows, fills the rows of one warp; the other warps only copy. That is enough: a 64-key tile of head size 128
is 32 KiB, which an H100's memory gives one SM every 2500 cycles, and two blocks share the SM. What counts is
how many bytes are under way, so shared memory goes into stages.
"""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.softmax import SoftmaxReference

MAX_STAGES = 4  # 96 KiB under way on an SM at head size 64, several times what memory latency asks for
BLOCKS_PER_SM = 2  # one block's begin and end pass under the other's copies


def choose_ampere_decode_config(dtype: DType, d_head: int, facts: DeviceFacts) -> FlashForwardKernelConfig:
    """The configuration for at most 64 queries (or queries times grouped heads) a kv head, with split keys.

    It has the largest tile of 64, 32 or 16 keys of which two stages leave room for a second block on the SM,
    and as many stages as still leave it. Where no tile does, it has 16 keys and one stage.

    Args:
        dtype: element type.
        d_head: head size of the kernel.
        facts: the GPU.
    """
    return _with_room(_smallest(dtype, d_head), facts, BLOCKS_PER_SM) or _smallest(dtype, d_head)


def choose_ampere_planned_config(dtype: DType, d_head: int, facts: DeviceFacts) -> FlashForwardKernelConfig:
    """The configuration for chunks of prompts and decoding together, where the device plans the work.

    128 rows of eight warps, one block an SM: a warp has 16 rows, since 32 leave no registers for pages and
    grouped heads. Where shared memory has no room for two stages of them, it is that of decoding.

    Args:
        dtype: element type.
        d_head: head size of the kernel.
        facts: the GPU.
    """
    tall = replace(_smallest(dtype, d_head), B_r=128, n_warps=8, B_c=32)
    widest = 32 if d_head > 128 else 64  # O and S of more do not fit the registers
    return _with_room(tall, facts, 1, widest) or choose_ampere_decode_config(dtype, d_head, facts)


def _with_room(
    config: FlashForwardKernelConfig, facts: DeviceFacts, blocks_per_sm: int, widest: int = 64
) -> FlashForwardKernelConfig | None:
    """The configuration with the largest tile, and the most stages of it, that leave room for so many."""
    for B_c in (B_c for B_c in (64, 32, 16) if B_c <= widest):
        for kv_stages in range(MAX_STAGES, 1, -1):
            wider = replace(config, B_c=B_c, kv_stages=kv_stages, mbarrier=True)
            block_bytes = wider.smem_bytes() + facts.smem_reserved_per_block
            if blocks_per_sm * block_bytes <= facts.smem_per_sm and not wider.malformed_reason():
                return wider
    return None


def _smallest(dtype: DType, d_head: int) -> FlashForwardKernelConfig:
    return FlashForwardKernelConfig(
        dtype=dtype,
        d_head=d_head,
        B_r=64,
        B_c=16,
        n_warps=4,
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
