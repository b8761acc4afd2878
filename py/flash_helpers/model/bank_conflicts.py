"""Bank conflicts of each shared-memory access of a kernel, computed from its layout.

Shared memory has 32 banks of 4 bytes. An access of 16 bytes a lane is served in phases of 8 lanes,
ldmatrix one 8 x 8 square (8 row addresses of 16 bytes) at a time. A phase takes as many wavefronts as
the most loaded bank has different words; one is the ideal. The offsets mirror ``SmemTile`` of
``swizzling.cuh``; a test compiles that header and compares. The Hopper family's tiles, written by TMA and
read by wgmma, have the same layout; its own threads address them only to stage O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flash_helpers.kernels.ampere.forward.config import WARP_SIZE
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import ForwardConfig

BANKS = 32
BANK_BYTES = 4
CHUNK_BYTES = 16
PANEL_COLUMNS = 64
ROW_BYTES = PANEL_COLUMNS * 2
ROW_CHUNKS = ROW_BYTES // CHUNK_BYTES


def smem_offset(rows: int, row: int, chunk: int, swizzled: bool) -> int:
    """Byte offset of a 16-byte chunk in a tile of ``rows`` rows, cut into panels of 64 columns."""
    column = chunk % ROW_CHUNKS
    position = column ^ (row % 8) if swizzled else column
    return chunk // ROW_CHUNKS * rows * ROW_BYTES + row * ROW_BYTES + position * CHUNK_BYTES


def wavefronts(addresses: Iterable[int], width: int) -> int:
    """Wavefronts that one phase takes: lanes reading ``width`` bytes at byte ``addresses``."""
    words: dict[int, set[int]] = {}
    for address in addresses:
        for word in range(address // BANK_BYTES, (address + width) // BANK_BYTES):
            words.setdefault(word % BANKS, set()).add(word)
    return max(len(found) for found in words.values())


@dataclass(frozen=True)
class SharedAccess:
    """One kind of shared-memory access of a warp.

    Attributes:
        name: what is accessed, how.
        wavefronts: that one instruction takes.
        ideal: without conflicts.
    """

    name: str
    wavefronts: int
    ideal: int

    @property
    def ways(self) -> float:
        """1 without conflicts; 8: eight times as long."""
        return self.wavefronts / self.ideal


def shared_accesses(config: ForwardConfig) -> list[SharedAccess]:
    """Every kind of access of one configuration; the worst warp and the worst tile of each."""
    if isinstance(config, HopperForwardKernelConfig):
        return [] if config.direct_store else [_staged_output(config)]
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
        _access(f"Q into shared memory, {copy}", copies(B_r), CHUNK_BYTES),
        _access(f"K, V into shared memory, {copy}", copies(B_c), CHUNK_BYTES),
        _access("Q to registers, ldmatrix", ldmatrix(B_r, lambda n: n % 16, lambda n: n // 16), CHUNK_BYTES),
        _access(
            "K to registers, ldmatrix",
            ldmatrix(B_c, lambda n: n % 8 + 8 * (n // 16), lambda n: n // 8 % 2),
            CHUNK_BYTES,
        ),
        _access(
            "V to registers, ldmatrix.trans", ldmatrix(B_c, lambda n: n % 16, lambda n: n // 16), CHUNK_BYTES
        ),
        _access("O into shared memory, st.shared", stage_O(), BANK_BYTES),
        _access("O out of shared memory, ld.shared", copies(B_r), CHUNK_BYTES),
    ]


def _staged_output(config: HopperForwardKernelConfig) -> SharedAccess:
    """O into its Q slot: one stmatrix.x4 is 16 rows of two chunks."""
    places = [
        [smem_offset(config.B_r, row + lane % 16, chunk + lane // 16, True) for lane in range(WARP_SIZE)]
        for row in range(0, config.B_r, 16)
        for chunk in range(0, config.d_head_v // 8, 2)
    ]
    return _access("O into shared memory, stmatrix", places, CHUNK_BYTES)


def _access(name: str, places: list[list[int]], width: int) -> SharedAccess:
    lanes_per_phase = WARP_SIZE if width == BANK_BYTES else 8
    phases = WARP_SIZE // lanes_per_phase
    worst = max(
        sum(wavefronts(a[i * lanes_per_phase : (i + 1) * lanes_per_phase], width) for i in range(phases))
        for a in places
    )
    return SharedAccess(name, worst, phases)
