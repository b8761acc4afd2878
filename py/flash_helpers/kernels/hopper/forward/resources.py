"""Shared memory and registers of the Hopper family's forward kernels, as C++ lays them out.

``src/include/hopper/forward/static_kernel_configuration.cuh`` computes the same.
"""

from __future__ import annotations

from typing import Protocol

from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits

WARPGROUP_SIZE = 128  # threads
WARPGROUP_ROWS = 64  # query rows of one wgmma
PANEL_COLUMNS = 64  # elements of a 128-byte row, the widest that TMA swizzles
CONTROL_BYTES = 1024  # barriers and work items
MAX_SMEM_BYTES = 227 * 1024  # of a block
KEPT_BYTES = 16  # of a consumer thread, in a slot of what chunks of keys have left

REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Registers a thread by number of consumer warpgroups: (producer, consumer). ``register_budget`` in C++."""

WARP_LOADS_REGISTERS = {**REGISTERS, 1: (56, 240), 2: (72, 216)}
"""The same where a whole warp finds sequences or parts of keys: ``varlen`` and ``split``."""

PLANNED_REGISTERS = {**REGISTERS, 1: (128, 240), 2: (88, 208)}
"""The same where it plans the work, too."""

REGISTER_OVERHEAD = {1: 24, 2: 24, 3: 28, 4: 28}
"""Registers a consumer needs beside accumulators and P: found by compiling, the first that does not spill."""


class Fields(Protocol):
    """What resources and rules read of a configuration, see ``HopperForwardKernelConfig``."""

    @property
    def d_head(self) -> int: ...
    @property
    def d_head_v(self) -> int: ...
    @property
    def B_r(self) -> int: ...
    @property
    def B_c(self) -> int: ...
    @property
    def kv_stages(self) -> int: ...
    @property
    def q_stages(self) -> int: ...
    @property
    def overlap_products(self) -> bool: ...
    @property
    def ping_pong(self) -> bool: ...
    @property
    def softmax_reference(self) -> SoftmaxReference: ...
    @property
    def forced_overlap(self) -> bool: ...
    @property
    def next_item(self) -> NextItem: ...
    @property
    def direct_store(self) -> bool: ...
    @property
    def head_sections(self) -> bool: ...
    @property
    def early_pass(self) -> bool: ...
    @property
    def half_tiles(self) -> bool: ...
    @property
    def section_heads(self) -> int: ...
    @property
    def prefetch_next(self) -> int: ...
    @property
    def extra_k_stages(self) -> int: ...
    @property
    def q_register_steps(self) -> int: ...
    @property
    def chunk_tiles(self) -> int: ...
    @property
    def n_consumers(self) -> int: ...


def padded(d_head: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-d_head // PANEL_COLUMNS) * PANEL_COLUMNS


# ---------------------------------------------------------------------- shared memory
def smem_bytes(config: Fields, elem_size: int = 2) -> int:
    """Of a block: Q slots, K and V rings (columns padded to 64), what chunks of keys have left, as far as
    there is room, and barriers.
    """
    tiles = _tile_bytes(config, elem_size)
    return tiles + _kept_slots(config, tiles) * _kept_slot_bytes(config) + CONTROL_BYTES


def kept_sums(config: Fields, sm_count: int) -> int:
    """Floats of memory in which the thread blocks of ``sm_count`` multiprocessors, one each, keep what
    chunks of keys have left, beyond what their shared memory holds.
    """
    slots = _wanted_kept_slots(config) - _kept_slots(config, _tile_bytes(config, 2))
    return sm_count * slots * _kept_slot_bytes(config) // 4


def _tile_bytes(config: Fields, elem_size: int) -> int:
    q = config.q_stages * config.B_r * padded(config.d_head)
    k = (config.kv_stages + config.extra_k_stages) * config.B_c * padded(config.d_head)
    v = config.kv_stages * config.B_c * padded(config.d_head_v)
    return (q + k + v) * elem_size


def _wanted_kept_slots(config: Fields) -> int:
    return config.d_head_v // 8 + 2 if config.chunk_tiles else 0


def _kept_slot_bytes(config: Fields) -> int:
    return config.n_consumers * WARPGROUP_SIZE * KEPT_BYTES


def _kept_slots(config: Fields, tiles: int) -> int:
    room = max(MAX_SMEM_BYTES - CONTROL_BYTES - tiles, 0)
    return min(room // _kept_slot_bytes(config), _wanted_kept_slots(config))


# ---------------------------------------------------------------------- registers
def register_budget(config: Fields, traits: ForwardTraits = PLAIN) -> tuple[int, int]:
    """Registers of a thread of the producer and of a consumer, compiled for some traits."""
    warp_loads = WARP_LOADS_REGISTERS if traits.varlen or traits.split else REGISTERS
    return (PLANNED_REGISTERS if traits.planned else warp_loads)[config.n_consumers]


def resident_registers(config: Fields) -> int:
    """Of a consumer thread, through the main loop.

    S and O in float32, the part of Q kept there, and, where products overlap, P of the tile before: P V
    reads it while the next S is computed.
    """
    accumulators = (config.B_c + config.d_head_v) // 2
    q = 4 * config.q_register_steps
    return accumulators + q + (config.B_c // 4 if config.overlap_products else 0)
