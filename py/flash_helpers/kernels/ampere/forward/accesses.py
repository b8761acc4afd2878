"""The accesses of the Ampere family's forward kernels to shared memory."""

from __future__ import annotations

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.ampere.tile_accesses import accumulators, copies, down, right
from flash_helpers.kernels.shared_memory import BANK_BYTES, CHUNK_BYTES, SharedAccess, access


def shared_accesses(config: FlashForwardKernelConfig) -> list[SharedAccess]:
    """Every kind of access of one configuration; the worst warp and the worst tile of each."""
    copy = "cp.async" if config.async_copy else "st.shared"
    Q = (config.B_r, config.d_head // 8, config.swizzled)
    KV = (config.B_c, config.d_head // 8, config.swizzled)
    return [
        access(f"Q into shared memory, {copy}", copies(*Q), CHUNK_BYTES),
        access(f"K, V into shared memory, {copy}", copies(*KV), CHUNK_BYTES),
        access("Q to registers, ldmatrix", down(*Q), CHUNK_BYTES),
        access("K to registers, ldmatrix", right(*KV), CHUNK_BYTES),
        access("V to registers, ldmatrix.trans", down(*KV), CHUNK_BYTES),
        access("O into shared memory, st.shared", accumulators(*Q), BANK_BYTES),
        access("O out of shared memory, ld.shared", copies(*Q), CHUNK_BYTES),
    ]
