"""How long each unit of an SM is busy with one K/V block of one thread block, in clocks.

Rates are of compute capability 8.0 to 9.0. Every figure is the least that the work takes; what a kernel takes
beyond it is waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.cost_model import EXP2_PER_CLOCK
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.model.of import model_of

ISSUE_SLOTS = 4  # warp instructions that one SM issues in a clock; CUDA C++ programming guide


@dataclass(frozen=True)
class LoopFacts:
    """What the compiled main loop adds to what the configuration says.

    Attributes:
        instructions: that one warp executes for a K/V block.
        local_wavefronts: shared memory clocks of one warp's accesses to spilled registers.
    """

    instructions: int
    local_wavefronts: int


@dataclass(frozen=True)
class StepCosts:
    """Clocks of one K/V block of one thread block.

    Attributes:
        matrix: products, at the rate of the instruction that the family uses.
        exp2: exponentials.
        shared_memory: fragments read, tiles written, bank conflicts, spilled registers.
        issue: instructions of all warps.
        latency: the chain that one warp goes through: scores, row maximum, exponentials, output.
        spill: the part of ``shared_memory`` that spilled registers take.
    """

    matrix: float
    exp2: float
    shared_memory: float
    issue: float
    latency: float
    spill: float = 0.0


def step_costs(
    config: KernelConfig, facts: DeviceFacts, loop: LoopFacts | None = None, spilled_registers: int = 0
) -> StepCosts:
    """Clocks of each unit for one K/V block of one thread block.

    Args:
        config: the configuration.
        facts: the device, whose matrix rate and clock are known.
        loop: what was compiled; None: predicted.
        spilled_registers: predicted, where nothing is compiled: each is stored and loaded once a block.
    """
    model, pairs = model_of(config), config.B_r * config.B_c
    flop_per_clock = model.matrix_share(facts) * facts.mma_flops / (facts.sm_count * facts.clock_hz)
    matrix = pairs * model.flop_of_pair(config) / flop_per_clock
    warps = model.computing_warps(config)
    instructions = loop.instructions if loop else predicted_instructions(config)
    local = loop.local_wavefronts if loop else 2 * spilled_registers
    return StepCosts(
        matrix=matrix,
        exp2=pairs / EXP2_PER_CLOCK,
        shared_memory=model.wavefronts(config) + warps * local,
        issue=warps * instructions / ISSUE_SLOTS,
        latency=model.latency(config, matrix),
        spill=warps * local,
    )


def predicted_instructions(config: KernelConfig) -> int:
    """Instructions that one warp executes for a K/V block, from the configuration alone."""
    return model_of(config).instructions(config)
