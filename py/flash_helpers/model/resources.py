"""Registers, shared memory, and how many thread blocks run on one SM."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flash_helpers.kernels.cost_model import Registers
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.shared_memory import WARP_SIZE
from flash_helpers.model.of import model_of

# How the hardware hands out an SM's resources (CUDA occupancy calculator, compute capability 8.0 to 9.0).
REGISTER_UNIT = 8  # a thread's registers are rounded up to this
SMEM_UNIT = 128  # a block's shared memory is rounded up to this, bytes
SUB_PARTITIONS = 4  # parts of an SM, each with a quarter of the registers; a warp stays in one part


def predict_registers(config: KernelConfig) -> Registers:
    """Predicts registers from the configuration alone.

    ``flash-attention explain --model-error`` prints how far off that is over all recorded kernels.
    """
    return model_of(config).registers(config)


@dataclass(frozen=True)
class Occupancy:
    """How many thread blocks run on one SM at a time.

    Attributes:
        blocks: that number; 0: the kernel can't run.
        limits: resource to the number of blocks it would allow.
        limited_by: the resources that allow no more than ``blocks``.
        warps: resident warps of an SM.
    """

    blocks: int
    limits: dict[str, int]
    limited_by: tuple[str, ...]
    warps: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def occupancy(n_warps: int, registers: int, smem_bytes: int, facts: DeviceFacts) -> Occupancy:
    """Blocks per SM by each resource.

    Args:
        n_warps: warps of a block.
        registers: of a thread.
        smem_bytes: shared memory a block asks for.
        facts: the device.
    """
    per_warp = _round_up(registers, REGISTER_UNIT) * WARP_SIZE
    warps_by_registers = facts.registers_per_sm // SUB_PARTITIONS // per_warp * SUB_PARTITIONS
    smem = _round_up(smem_bytes + facts.smem_reserved_per_block, SMEM_UNIT)
    limits = {
        "registers": warps_by_registers // n_warps,
        "shared memory": facts.smem_per_sm // smem if smem_bytes <= facts.smem_per_block else 0,
        "threads": facts.threads_per_sm // (n_warps * WARP_SIZE),
        "blocks": facts.blocks_per_sm,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, limits, limited_by, blocks * n_warps)


@dataclass(frozen=True)
class Waves:
    """How a grid fills the GPU.

    Attributes:
        thread_blocks: of the whole grid.
        at_a_time: thread blocks that run at one time.
        waves: thread_blocks / at_a_time.
        utilisation: waves / whole waves: what the last, partly filled wave leaves of the GPU.
    """

    thread_blocks: int
    at_a_time: int
    waves: float
    utilisation: float

    @classmethod
    def of(cls, thread_blocks: int, blocks_per_sm: int, sm_count: int) -> Waves:
        """The waves of a grid of equally long thread blocks."""
        at_a_time = blocks_per_sm * sm_count
        if not at_a_time or not thread_blocks:
            return cls(thread_blocks, at_a_time, 0.0, 0.0)
        whole = -(-thread_blocks // at_a_time)
        waves = thread_blocks / at_a_time
        return cls(thread_blocks, at_a_time, waves, waves / whole)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
