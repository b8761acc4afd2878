"""Registers, shared memory, and how many thread blocks run on one SM."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median
from typing import Any

from flash_helpers.kernels.ampere.forward.config import MMA_M, WARP_SIZE, FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward import config as hopper
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.sets import MAX_REGISTERS, REGISTER_OVERHEAD
from flash_helpers.model.recorded import all_recorded

# Registers beside O, S and a held Q: least absolute differences over recorded kernels (nvcc 13.0, 2026-11).
AMPERE_OVERHEAD = {
    "constant": 78.93, "resident": 0.43, "row_tiles": -21.89, "whole_K": 19.23, "mbarrier": 8.65,
    "waiting_copies": 5.2, "plain_softmax": 3.01, "held_Q": -16.28, "single_fragments": -28.12,
}  # fmt: skip

# How the hardware hands out an SM's resources (CUDA occupancy calculator, compute capability 8.0 to 9.0).
REGISTER_UNIT = 8  # a thread's registers are rounded up to this
SMEM_UNIT = 128  # a block's shared memory is rounded up to this, bytes
SM_REGISTERS = 65536  # on every GPU from compute capability 8.0 to 9.0
SUB_PARTITIONS = 4  # parts of an SM, each with a quarter of the registers; a warp stays in one part


@dataclass(frozen=True)
class Registers:
    """A simple prediction of a thread's 32-bit registers.

    Attributes:
        accumulators: O and S, float32; P takes the place of S.
        held_Q: Q fragments that stay in registers.
        held_P: P of the tile before, which its product reads while the next S is computed.
        overhead: streamed fragments, addresses, row maxima and sums, temporaries.
        total: what a thread is given at launch: the sum, at most 255; in the Hopper family, whose warpgroups
            trade registers afterwards, the SM's registers over the block's threads.
        budget: what the thread may use.
        predicted_spill: how many pass the budget and go to local memory.
    """

    accumulators: int
    held_Q: int
    overhead: int
    total: int
    predicted_spill: int
    held_P: int = 0
    budget: int = MAX_REGISTERS


def predict_registers(config: ForwardConfig) -> Registers:
    """Predicts registers from the configuration alone.

    In the Ampere family the compiler takes what a thread may have where that helps: what it takes beside O, S
    and a held Q was fitted to compiled kernels. ``flash-attention explain --model-error`` prints how far off
    that is over all recorded ones.
    """
    if isinstance(config, HopperForwardKernelConfig):
        return _predict_consumer(config)
    columns = config.d_head // config.warps_per_group
    accumulators = config.rows_per_warp * (columns + config.B_c) // WARP_SIZE
    resident = config.resident_registers()
    total = round(min(resident + _ampere_overhead(config), MAX_REGISTERS))
    return Registers(
        accumulators=accumulators,
        held_Q=resident - accumulators,
        overhead=max(0, total - resident),
        total=total,
        predicted_spill=max(0, resident + REGISTER_OVERHEAD - MAX_REGISTERS),
    )


def _ampere_overhead(config: FlashForwardKernelConfig) -> float:
    """Registers beside O, S and a held Q, fitted to ``recorded.json``."""
    fit = AMPERE_OVERHEAD
    overhead = fit["constant"] + fit["resident"] * config.resident_registers()
    overhead += fit["row_tiles"] * (config.rows_per_warp // MMA_M)
    overhead += fit["whole_K"] * (config.K_mma_load_K_tiles == 0)
    overhead += fit["mbarrier"] * config.mbarrier
    overhead += fit["waiting_copies"] * (not config.eager_load_blocks)
    overhead += fit["plain_softmax"] * (not config.optimized_softmax)
    overhead += fit["held_Q"] * (config.Q_mma_load_K_tiles == 0)
    return overhead + fit["single_fragments"] * (config.fragments_ahead > 0)


@dataclass(frozen=True)
class ModelError:
    """How far predictions are from what is known.

    Attributes:
        count: of comparisons.
        median, worst: of the absolute differences.
        worst_case: what the worst one is of.
    """

    count: int
    median: float
    worst: float
    worst_case: str


@lru_cache(1)
def register_error() -> ModelError:
    """Registers of the Ampere family: predictions against every recorded kernel.

    Those of the Hopper family follow from the block's threads; counting them would flatter the prediction.
    """
    from flash_helpers.kernel_selection import parse_kernel

    differences = []
    for (name, target), facts in all_recorded().items():
        config = parse_kernel(name, False).config
        if isinstance(config, HopperForwardKernelConfig):
            continue
        predicted = predict_registers(config).total
        differences.append((abs(predicted - facts.registers), f"{name}, sm_{target}"))
    worst, case = max(differences, default=(0, ""))
    return ModelError(len(differences), median([d for d, _ in differences] or [0]), worst, case)


def _predict_consumer(config: HopperForwardKernelConfig) -> Registers:
    """A consumer thread of the Hopper family: its budget is fixed, its overhead was found by compiling."""
    accumulators = (config.B_c + config.d_head_v) // 2
    held_P = config.resident_registers() - accumulators
    overhead = hopper.REGISTER_OVERHEAD[config.n_consumers]
    _, budget = hopper.REGISTERS[config.n_consumers]
    at_launch = SM_REGISTERS // config.n_threads // REGISTER_UNIT * REGISTER_UNIT
    return Registers(
        accumulators=accumulators,
        held_Q=0,
        held_P=held_P,
        overhead=overhead,
        total=min(at_launch, MAX_REGISTERS),
        budget=budget,
        predicted_spill=max(0, accumulators + held_P + overhead - budget),
    )


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
