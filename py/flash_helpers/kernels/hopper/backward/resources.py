"""Shared memory and registers of the Hopper family's backward kernels, as C++ lays them out.

``static_kernel_configuration.cuh`` and ``static_dq_configuration.cuh`` in ``src/include/hopper/backward/``
compute the same.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

WARPGROUP_SIZE = 128  # threads
WARPGROUP_ROWS = 64  # of one wgmma
CONSUMERS = 2  # warpgroups
PANEL_COLUMNS = 64  # elements of a 128-byte row, the widest that TMA swizzles
CONTROL_BYTES = 1024  # barriers and items
DS_STAGES = 2
MAX_SMEM_BYTES = 227 * 1024
DQ_B_R = CONSUMERS * WARPGROUP_ROWS  # query rows of a block of dQ's own kernel
DQ_KV_STAGES = 2  # of K there; V has as many where they fit

CONSUMER_REGISTERS = {False: 232, True: 240}
"""Registers a thread of a consumer warpgroup; the larger number with ``float_p`` or dQ's own kernel."""
REGISTER_OVERHEAD = 16
"""Registers that a consumer needs beside the tiles: found by compiling, the most that do not spill."""
REGISTER_OVERHEAD_OF_128_ROWS = 32
"""The same with B_r of 128: tiles of 192 fit, of 224 with head size 96 more than a kilobyte is spilled."""


class DqOutput(IntEnum):
    """How dQ, to which every key tile that a query sees adds a part, comes together.

    Attributes:
        BULK_REDUCTION: parts are staged in shared memory, and bulk reductions add them to float32 sums.
        REGISTER_REDUCTION: parts are added from registers, 16 bytes a thread.
        OWN_KERNEL: a kernel of its own goes over the query blocks and computes S and dP a second time.
            Nothing is added in an order that may differ: equal calls give equal bits.
        BLOCK_SUMS: a block takes all keys of a head, one tile after the other, and has the sums to itself. It
            stores the first part of a query block, adds others by bulk reductions, and rounds the last sum:
            nothing is cleared before and converted after, and equal calls give equal bits.
    """

    BULK_REDUCTION = 0
    REGISTER_REDUCTION = 1
    OWN_KERNEL = 2
    BLOCK_SUMS = 3

    @property
    def is_staged(self) -> bool:
        """Whether parts go through shared memory."""
        return self in (DqOutput.BULK_REDUCTION, DqOutput.BLOCK_SUMS)

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"DqOutput::{self.name}"


class Fields(Protocol):
    """What resources and rules read of a configuration, see ``HopperBackwardKernelConfig``."""

    @property
    def d_head(self) -> int: ...
    @property
    def d_head_v(self) -> int: ...
    @property
    def B_r(self) -> int: ...
    @property
    def B_c(self) -> int: ...
    @property
    def q_stages(self) -> int: ...
    @property
    def k_stages(self) -> int: ...
    @property
    def v_stages(self) -> int: ...
    @property
    def dq_output(self) -> DqOutput: ...
    @property
    def late_dq(self) -> bool: ...
    @property
    def ping_pong(self) -> bool: ...
    @property
    def lse_ahead(self) -> bool: ...
    @property
    def float_p(self) -> bool: ...
    @property
    def trimmed(self) -> bool: ...
    @property
    def split_gradients(self) -> bool: ...
    @property
    def dq_B_c(self) -> int: ...
    @property
    def sums_dq(self) -> bool: ...


def dq_columns(config: Fields) -> int:
    """Columns of a warpgroup's part of dQ: where a step has 64 rows, half of them."""
    return config.d_head // (CONSUMERS if config.B_r == WARPGROUP_ROWS else 1)


def register_overhead(config: Fields) -> int:
    """Registers of a consumer thread of the main kernel beside the tiles."""
    return REGISTER_OVERHEAD if config.B_r == WARPGROUP_ROWS else REGISTER_OVERHEAD_OF_128_ROWS


def consumer_registers(config: Fields) -> int:
    """Registers a thread of a consumer warpgroup of the main kernel."""
    return CONSUMER_REGISTERS[config.float_p or not config.sums_dq]


def padded(columns: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-columns // PANEL_COLUMNS) * PANEL_COLUMNS


def smem_bytes(config: Fields, elem_size: int = 2) -> int:
    """Of a block of the main kernel: slots of K, V, Q, dO and dS, staged dQ, rows, barriers."""
    d, d_v = padded(config.d_head), padded(config.d_head_v)
    keys = config.B_c * (config.k_stages * d + config.v_stages * d_v)
    queries = config.q_stages * config.B_r * (d + d_v)
    scores = DS_STAGES * config.B_c * padded(config.B_r) if config.sums_dq else 0
    staged = config.B_r * config.d_head * 4 if config.dq_output.is_staged else 0
    exchanged = DS_STAGES * config.B_c * config.B_r * (4 if config.float_p else 2)
    rows = config.q_stages * config.B_r * 2 * 4  # LSE and delta
    return (
        (keys + queries + scores) * elem_size
        + staged
        + (exchanged if config.split_gradients else 0)
        + rows
        + CONTROL_BYTES
    )


def dq_smem_bytes(config: Fields, elem_size: int = 2) -> int:
    """Of a block of dQ's own kernel, with as many slots as fit (``dq_stages``)."""
    q_stages, v_stages = dq_stages(config, elem_size)
    return _dq_smem_bytes(config, q_stages, v_stages, elem_size)


def dq_stages(config: Fields, elem_size: int = 2) -> tuple[int, int]:
    """Slots of Q and dO, and of V, in dQ's own kernel: two each where they fit, else first one of Q."""
    for stages in ((2, 2), (1, 2)):
        if _dq_smem_bytes(config, *stages, elem_size) <= MAX_SMEM_BYTES:
            return stages
    return 1, 1


def _dq_smem_bytes(config: Fields, q_stages: int, v_stages: int, elem_size: int = 2) -> int:
    d, d_v = padded(config.d_head), padded(config.d_head_v)
    queries = q_stages * DQ_B_R * (d + d_v)
    keys = config.dq_B_c * (DQ_KV_STAGES * d + v_stages * d_v)
    return (queries + keys) * elem_size + CONTROL_BYTES


def resident_registers(config: Fields) -> int:
    """Of a consumer thread of the main kernel, where most are in use.

    dK and dV stay. While dS is made: dP, P of dV, dS in the place of its P in FP16, and, with float_p, P in
    float32. Later the next scores, with their LSE, and dQ; without dQ P and dS, but for 128 rows. With
    ``split_gradients`` a warpgroup has one of the gradients.
    """
    tile, packed = config.B_r // 2, config.B_r // 4
    if config.split_gradients:
        return max(config.d_head, config.d_head_v) // 2 + tile + 2 * packed
    sums = (config.d_head + config.d_head_v) // 2
    score_gradients = tile + 2 * packed + (tile if config.float_p else 0)
    beside = 2 * packed if config.B_r == WARPGROUP_ROWS else 0
    if config.sums_dq:
        beside = config.B_r * config.d_head // (CONSUMERS * WARPGROUP_SIZE)
    next_scores = beside + tile + (packed if config.lse_ahead else 0)
    return sums + max(score_gradients, next_scores)


def dq_resident_registers(config: Fields) -> int:
    """Of a consumer thread of dQ's own kernel: dQ, S, dP and dS."""
    return config.d_head // 2 + config.dq_B_c + config.dq_B_c // 4
