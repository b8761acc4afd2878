"""How a warp of the Ampere family touches a tile in shared memory, as addresses of its lanes."""

from __future__ import annotations

from collections.abc import Callable

from flash_helpers.kernels.shared_memory import ROW_CHUNKS, WARP_SIZE, smem_offset

Places = list[list[int]]
"""For each place where a warp may stand, the address of each lane."""


def copies(rows: int, chunks: int, swizzled: bool) -> Places:
    """A copy of 16 bytes a lane: 4 rows of 8 chunks, of a tile of ``rows`` rows of ``chunks`` chunks."""
    return [
        [
            smem_offset(rows, first + lane // ROW_CHUNKS, panel * ROW_CHUNKS + lane % ROW_CHUNKS, swizzled)
            for lane in range(WARP_SIZE)
        ]
        for first in range(0, rows, WARP_SIZE // ROW_CHUNKS)
        for panel in range(chunks // ROW_CHUNKS)
    ]


def ldmatrix(
    rows: int, chunks: int, swizzled: bool, row_of: Callable[[int], int], chunk_of: Callable[[int], int]
) -> Places:
    """Row addresses of one ldmatrix.x4, for each 16 x 16 tile."""
    return [
        [smem_offset(rows, row + row_of(lane), chunk + chunk_of(lane), swizzled) for lane in range(WARP_SIZE)]
        for row in range(0, rows, 16)
        for chunk in range(0, chunks, 2)
    ]


def down(rows: int, chunks: int, swizzled: bool) -> Places:
    """Squares go down first: A as it lies, B transposed."""
    return ldmatrix(rows, chunks, swizzled, lambda n: n % 16, lambda n: n // 16)


def right(rows: int, chunks: int, swizzled: bool) -> Places:
    """Squares go to the right first: B as it lies, A transposed."""
    return ldmatrix(rows, chunks, swizzled, lambda n: n % 8 + 8 * (n // 16), lambda n: n // 8 % 2)


def accumulators(rows: int, chunks: int, swizzled: bool) -> Places:
    """A lane stores 4 bytes of row lane / 4; the chunk is the number of the 8-column tile."""
    return [
        [smem_offset(rows, row + lane // 4, chunk, swizzled) + 4 * (lane % 4) for lane in range(WARP_SIZE)]
        for row in range(0, rows, 8)
        for chunk in range(chunks)
    ]
