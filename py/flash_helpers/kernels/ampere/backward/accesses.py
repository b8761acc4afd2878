"""The accesses of the Ampere family's backward kernels to shared memory."""

from __future__ import annotations

from flash_helpers.kernels.ampere.backward.config import FlashBackwardKernelConfig
from flash_helpers.kernels.ampere.tile_accesses import accumulators, copies, down, right
from flash_helpers.kernels.shared_memory import BANK_BYTES, CHUNK_BYTES, SharedAccess, access


def shared_accesses(config: FlashBackwardKernelConfig) -> list[SharedAccess]:
    """Every kind of access of one configuration; the worst warp and the worst tile of each."""
    Q = (config.B_r, config.d_head // 8, config.swizzled)
    K = (config.B_c, config.d_head // 8, config.swizzled)
    dS = (config.B_c, config.B_r // 8, config.swizzled)
    return [
        access("Q, dO into shared memory, cp.async", copies(*Q), CHUNK_BYTES),
        access("K, V into shared memory, cp.async", copies(*K), CHUNK_BYTES),
        access("K, V to registers, ldmatrix", down(*K), CHUNK_BYTES),
        access("Q, dO to registers, ldmatrix", right(*Q), CHUNK_BYTES),
        access("Q, dO to registers, ldmatrix.trans", down(*Q), CHUNK_BYTES),
        access("dS into shared memory, st.shared", accumulators(*dS), BANK_BYTES),
        access("dS to registers, ldmatrix.trans", right(*dS), CHUNK_BYTES),
        access("K to registers, ldmatrix.trans", down(*K), CHUNK_BYTES),
    ]
