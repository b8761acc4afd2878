"""The Ampere family's accesses to shared memory."""

from __future__ import annotations

from collections.abc import Callable

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.shared_memory import (
    BANK_BYTES,
    CHUNK_BYTES,
    ROW_CHUNKS,
    WARP_SIZE,
    SharedAccess,
    access,
    smem_offset,
)


def shared_accesses(config: FlashForwardKernelConfig) -> list[SharedAccess]:
    """Every kind of access of one configuration; the worst warp and the worst tile of each."""
    copy = "cp.async" if config.async_copy else "st.shared"
    B_r, B_c, d_head = config.B_r, config.B_c, config.d_head
    chunks = d_head // 8
    rows_per_copy = WARP_SIZE // ROW_CHUNKS

    def copies(rows: int) -> list[list[int]]:
        """Addresses of one warp, for each place where it may stand: 4 rows of 8 chunks."""
        return [
            [
                smem_offset(
                    rows, first + lane // ROW_CHUNKS, panel * ROW_CHUNKS + lane % ROW_CHUNKS, config.swizzled
                )
                for lane in range(WARP_SIZE)
            ]
            for first in range(0, rows, rows_per_copy)
            for panel in range(chunks // ROW_CHUNKS)
        ]

    def ldmatrix(rows: int, row_of: Callable[[int], int], chunk_of: Callable[[int], int]) -> list[list[int]]:
        """Row addresses of one ldmatrix.x4, for each 16 x 16 tile."""
        return [
            [
                smem_offset(rows, row + row_of(lane), chunk + chunk_of(lane), config.swizzled)
                for lane in range(WARP_SIZE)
            ]
            for row in range(0, rows, 16)
            for chunk in range(0, chunks, 2)
        ]

    def stage_O() -> list[list[int]]:
        """A lane stores 4 bytes of row lane / 4; the chunk is the number of the 8-column tile."""
        return [
            [
                smem_offset(B_r, row + lane // 4, chunk, config.swizzled) + 4 * (lane % 4)
                for lane in range(WARP_SIZE)
            ]
            for row in range(0, B_r, 8)
            for chunk in range(chunks)
        ]

    return [
        access(f"Q into shared memory, {copy}", copies(B_r), CHUNK_BYTES),
        access(f"K, V into shared memory, {copy}", copies(B_c), CHUNK_BYTES),
        access("Q to registers, ldmatrix", ldmatrix(B_r, lambda n: n % 16, lambda n: n // 16), CHUNK_BYTES),
        access(
            "K to registers, ldmatrix",
            ldmatrix(B_c, lambda n: n % 8 + 8 * (n // 16), lambda n: n // 8 % 2),
            CHUNK_BYTES,
        ),
        access(
            "V to registers, ldmatrix.trans", ldmatrix(B_c, lambda n: n % 16, lambda n: n // 16), CHUNK_BYTES
        ),
        access("O into shared memory, st.shared", stage_O(), BANK_BYTES),
        access("O out of shared memory, ld.shared", copies(B_r), CHUNK_BYTES),
    ]
