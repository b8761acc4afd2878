"""How long each unit of an SM is busy with one K/V block of one thread block, in clocks.

Rates are of compute capability 8.0 to 9.0. Every figure is the least that the work takes; what a kernel takes
beyond it is waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.ampere.forward.config import MMA_K as AMPERE_MMA_K
from flash_helpers.kernels.ampere.forward.config import WARP_SIZE, FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import (
    MMA_K,
    WARPGROUP_ROWS,
    WARPGROUP_SIZE,
    HopperForwardKernelConfig,
)
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.model.bank_conflicts import shared_accesses

# CUDA C++ programming guide, throughput of native arithmetic instructions.
EXP2_PER_CLOCK = 16  # results of one SM
ISSUE_SLOTS = 4  # warp instructions that one SM issues in a clock
WAVEFRONT_BYTES = 128  # what shared memory, which is also the L1 cache, moves in a clock

# Of an H100, from dependent chains of one instruction each; an A100's differ by a few clocks.
MMA_CLOCKS = 33  # from operands to result of mma.sync.m16n8k16
WGMMA_CLOCKS = 64  # what a chain of wgmma takes beside its products
LOAD_CLOCKS = 33  # ldmatrix, ld.shared
SHUFFLE_CLOCKS = 24
EXP2_CLOCKS = 40  # multiply-add, exp2, conversion to 16 bits
BARRIER_CLOCKS = 30

# What mma.sync reaches of the datasheet's matrix rate, by major compute capability. Hopper's full rate
# needs wgmma: mma.sync m16n8k16 was measured at 638 of 989 TFLOP/s with 16 warps an SM (H100, 2026-11).
MMA_SYNC_SHARE = {9: 638 / 989}

# Instructions of a warp and K/V block beside products, fragments, copies and softmax: addresses, waits, the
# loop. Found by compiling (see ``recorded``).
OTHER_INSTRUCTIONS = {"ampere": 110, "hopper": 100}


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


def matrix_share(config: ForwardConfig, facts: DeviceFacts) -> float:
    """Share of the datasheet's matrix rate that a configuration's instruction reaches on a device."""
    if isinstance(config, HopperForwardKernelConfig):
        return 1.0  # wgmma
    return MMA_SYNC_SHARE.get(facts.capability[0], 1.0)


def step_costs(
    config: ForwardConfig, facts: DeviceFacts, loop: LoopFacts | None = None, spilled_registers: int = 0
) -> StepCosts:
    """Clocks of each unit for one K/V block of one thread block.

    Args:
        config: the configuration.
        facts: the device, whose matrix rate and clock are known.
        loop: what was compiled; None: predicted.
        spilled_registers: predicted, where nothing is compiled: each is stored and loaded once a block.
    """
    pairs = config.B_r * config.B_c
    flop_per_clock = matrix_share(config, facts) * facts.mma_flops / (facts.sm_count * facts.clock_hz)
    matrix = 2 * pairs * (config.d_head + config.d_head_v) / flop_per_clock
    if isinstance(config, HopperForwardKernelConfig):
        warps, tiles = 4 * config.n_consumers, hopper_wavefronts(config)
        latency = _hopper_latency(config, matrix)
    else:
        warps, tiles = config.n_warps, ampere_wavefronts(config)
        latency = _ampere_latency(config)
    instructions = loop.instructions if loop else predicted_instructions(config)
    local = loop.local_wavefronts if loop else 2 * spilled_registers
    return StepCosts(
        matrix=matrix,
        exp2=pairs / EXP2_PER_CLOCK,
        shared_memory=tiles + warps * local,
        issue=warps * instructions / ISSUE_SLOTS,
        latency=latency,
        spill=warps * local,
    )


def ampere_wavefronts(config: FlashForwardKernelConfig) -> float:
    """Clocks of shared memory for one K/V block: every warp reads all of K and V, and Q unless it is held."""
    columns, itemsize = config.d_head // config.warps_per_group, config.dtype.itemsize
    ways = _ways(config)
    reads = config.n_warps * config.B_c * columns * (ways["K to"] + ways["V to"])
    if config.Q_mma_load_K_tiles:
        reads += config.n_warps * config.rows_per_warp * columns * ways["Q to"]
    writes = 2 * config.B_c * config.d_head * ways["K, V into"]
    # A pair exchanges scores in float32 and P: each written once and read once.
    boxes = config.B_r * config.B_c * 2 * (4 + itemsize) if config.paired_warps else 0
    return (itemsize * (reads + writes) + boxes) / WAVEFRONT_BYTES


def hopper_wavefronts(config: HopperForwardKernelConfig) -> float:
    """Clocks of shared memory for one K/V block: operands of wgmma, and tiles that TMA writes.

    A step of Q K^T reads 64 x 16 of Q, unless registers hold it, and B_c x 16 of K; one of P V reads 16 x
    d_head_v of V. Each warpgroup reads its own.
    """
    steps = config.d_head // MMA_K
    q = WARPGROUP_ROWS * MMA_K * (steps - config.q_register_steps)
    k, v = config.B_c * config.d_head, config.B_c * config.d_head_v
    elements = config.n_consumers * (q + k + v) + k + v
    return config.dtype.itemsize * elements / WAVEFRONT_BYTES


def predicted_instructions(config: ForwardConfig) -> int:
    """Instructions that one warp executes for a K/V block, from the configuration alone."""
    reference = config.softmax_reference
    if isinstance(config, HopperForwardKernelConfig):
        elements = WARPGROUP_ROWS * config.B_c // WARPGROUP_SIZE
        outputs = WARPGROUP_ROWS * config.d_head_v // WARPGROUP_SIZE
        moved, family = config.products_per_block, "hopper"
        sums = elements
    else:
        elements = config.rows_per_warp * config.B_c // WARP_SIZE
        columns = config.d_head // config.warps_per_group
        outputs = config.rows_per_warp * columns // WARP_SIZE
        fragments = 2 * config.B_c * columns // 256  # an ldmatrix.x4 brings four 8 x 8 squares
        if config.Q_mma_load_K_tiles:
            fragments += config.rows_per_warp * columns // 256
        copies = 2 * config.B_c * config.d_head // 8 // config.n_threads
        moved, family = config.products_per_block + fragments + 2 * copies, "ampere"
        sums = 0 if config.tensor_row_sums else elements
    softmax = 2 * elements + elements // 2 + sums  # multiply-add, exp2, half a conversion, sum
    softmax += {
        SoftmaxReference.ANCHORED: 0,
        SoftmaxReference.LAGGED: elements // 2,
    }.get(reference, elements)
    if reference == SoftmaxReference.EXACT:
        softmax += outputs
    if not config.optimized_softmax:
        softmax += elements
    return moved + softmax + OTHER_INSTRUCTIONS[family]


def _ways(config: FlashForwardKernelConfig) -> dict[str, float]:
    """How many times as long each access takes by its bank conflicts; by the beginning of its name."""
    begins = ("K to", "V to", "Q to", "K, V into")
    if config.swizzled:
        return dict.fromkeys(begins, 1.0)
    accesses = shared_accesses(config)
    return {begin: next(a.ways for a in accesses if a.name.startswith(begin)) for begin in begins}


def _softmax_latency(reference: SoftmaxReference) -> float:
    """Row maximum over the four lanes of a row, unless it is not waited for; then exp2."""
    waits = reference not in (SoftmaxReference.ANCHORED, SoftmaxReference.LAGGED)
    return EXP2_CLOCKS + (2 * SHUFFLE_CLOCKS if waits else 0)


def _ampere_latency(config: FlashForwardKernelConfig) -> float:
    """Products that add to the same registers follow one another: d_head / 16 of them, then B_c / 16."""
    columns = config.d_head // config.warps_per_group
    products = MMA_CLOCKS * (columns + config.B_c) // AMPERE_MMA_K
    return 2 * LOAD_CLOCKS + products + _softmax_latency(config.softmax_reference) + BARRIER_CLOCKS


def _hopper_latency(config: HopperForwardKernelConfig, matrix: float) -> float:
    """One warpgroup's products have the matrix units for themselves; its softmax issues on its own slots."""
    own = matrix / config.n_consumers
    scores = own * config.d_head / (config.d_head + config.d_head_v)
    softmax = WARPGROUP_ROWS * config.B_c / EXP2_PER_CLOCK + _softmax_latency(config.softmax_reference)
    if config.overlap_products:  # P V of the tile before runs under the softmax
        return WGMMA_CLOCKS + scores + max(softmax, own - scores)
    return 2 * WGMMA_CLOCKS + own + softmax
