"""Bank conflicts of an access to shared memory, computed from the layout of a tile.

Shared memory has 32 banks of 4 bytes. An access of 16 bytes a lane is served in phases of 8 lanes,
ldmatrix one 8 x 8 square (8 row addresses of 16 bytes) at a time. A phase takes as many wavefronts as
the most loaded bank has different words; one is the ideal. The offsets mirror ``SmemTile`` of
``swizzling.cuh``; a test compiles that header and compares. The Hopper family's tiles, written by TMA and
read by wgmma, have the same layout; its own threads address them only to stage O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WARP_SIZE = 32
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


def access(name: str, places: list[list[int]], width: int) -> SharedAccess:
    """An access by the addresses of a warp's lanes, for each place where the warp may stand."""
    lanes_per_phase = WARP_SIZE if width == BANK_BYTES else 8
    phases = WARP_SIZE // lanes_per_phase
    worst = max(
        sum(wavefronts(a[i * lanes_per_phase : (i + 1) * lanes_per_phase], width) for i in range(phases))
        for a in places
    )
    return SharedAccess(name, worst, phases)
