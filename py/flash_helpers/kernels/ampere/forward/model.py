"""What the Ampere family's forward kernels cost."""

from __future__ import annotations

from flash_helpers.kernels.ampere.forward.accesses import shared_accesses
from flash_helpers.kernels.ampere.forward.config import (
    MMA_K,
    MMA_M,
    WARP_SIZE,
    FlashForwardKernelConfig,
)
from flash_helpers.kernels.ampere.forward.sets import REGISTER_OVERHEAD
from flash_helpers.kernels.ampere.rates import BARRIER_CLOCKS, LOAD_CLOCKS, MMA_CLOCKS, MMA_SYNC_SHARE
from flash_helpers.kernels.cost_model import (
    MAX_REGISTERS,
    WAVEFRONT_BYTES,
    CostModel,
    Fit,
    Registers,
    softmax_instructions,
    softmax_latency,
)
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.shared_memory import SharedAccess

# Registers beside O, S and a held Q: least absolute differences over recorded kernels (nvcc 13.0, 2026-11).
OVERHEAD = {
    "constant": 78.93, "resident": 0.43, "row_tiles": -21.89, "whole_K": 19.23, "mbarrier": 8.65,
    "waiting_copies": 5.2, "plain_softmax": 3.01, "held_Q": -16.28, "single_fragments": -28.12,
}  # fmt: skip

# Instructions of a warp and K/V block beside products, fragments, copies and softmax: addresses, waits, the
# loop. Found by compiling (see ``flash_helpers.model.recorded``).
OTHER_INSTRUCTIONS = 110


class AmpereForwardModel(CostModel):
    """Warps that compute and copy; fragments of every operand are read by ``ldmatrix``."""

    fit = Fit(2.22, 8.0, 40.0, 1.2, 8450.0, 8450.0, 1.0, 1.0e-6, 0.2e-6)  # H100 and H200, 2026-11

    def registers(self, config: FlashForwardKernelConfig) -> Registers:
        """The compiler takes what a thread may have where that helps.

        What it takes beside O, S and a held Q was fitted to compiled kernels.
        """
        columns = config.d_head // config.warps_per_group
        accumulators = config.rows_per_warp * (columns + config.B_c) // WARP_SIZE
        resident = config.resident_registers()
        total = round(min(resident + _overhead(config), MAX_REGISTERS))
        return Registers(
            accumulators=accumulators,
            held_Q=resident - accumulators,
            overhead=max(0, total - resident),
            total=total,
            predicted_spill=max(0, resident + REGISTER_OVERHEAD - MAX_REGISTERS),
        )

    def matrix_share(self, facts: DeviceFacts) -> float:
        """Of ``mma.sync``."""
        return MMA_SYNC_SHARE.get(facts.capability[0], 1.0)

    def computing_warps(self, config: FlashForwardKernelConfig) -> int:
        """All of them."""
        return config.n_warps

    def wavefronts(self, config: FlashForwardKernelConfig) -> float:
        """Every warp reads all of K and V, and Q unless it is held."""
        columns, itemsize = config.d_head // config.warps_per_group, config.dtype.itemsize
        ways = _ways(config)
        reads = config.n_warps * config.B_c * columns * (ways["K to"] + ways["V to"])
        if config.Q_mma_load_K_tiles:
            reads += config.n_warps * config.rows_per_warp * columns * ways["Q to"]
        writes = 2 * config.B_c * config.d_head * ways["K, V into"]
        # A pair exchanges scores in float32 and P: each written once and read once.
        boxes = config.B_r * config.B_c * 2 * (4 + itemsize) if config.paired_warps else 0
        return (itemsize * (reads + writes) + boxes) / WAVEFRONT_BYTES

    def latency(self, config: FlashForwardKernelConfig, matrix: float) -> float:
        """Products that add to the same registers follow one another: d_head / 16 of them, then B_c / 16."""
        columns = config.d_head // config.warps_per_group
        products = MMA_CLOCKS * (columns + config.B_c) // MMA_K
        return 2 * LOAD_CLOCKS + products + softmax_latency(config.softmax_reference) + BARRIER_CLOCKS

    def instructions(self, config: FlashForwardKernelConfig) -> int:
        """Products, fragments, copies and softmax."""
        elements = config.rows_per_warp * config.B_c // WARP_SIZE
        columns = config.d_head // config.warps_per_group
        outputs = config.rows_per_warp * columns // WARP_SIZE
        fragments = 2 * config.B_c * columns // 256  # an ldmatrix.x4 brings four 8 x 8 squares
        if config.Q_mma_load_K_tiles:
            fragments += config.rows_per_warp * columns // 256
        copies = 2 * config.B_c * config.d_head // 8 // config.n_threads
        moved = config.products_per_block + fragments + 2 * copies
        sums = 0 if config.tensor_row_sums else elements
        reference, folded = config.softmax_reference, config.optimized_softmax
        return moved + softmax_instructions(reference, elements, outputs, sums, folded) + OTHER_INSTRUCTIONS

    def shared_accesses(self, config: FlashForwardKernelConfig) -> list[SharedAccess]:
        """See ``accesses``."""
        return shared_accesses(config)

    def waits_for_copies(self, config: FlashForwardKernelConfig) -> bool:
        """Without blocks that are under way ahead of their use."""
        return not config.eager_load_blocks


def _overhead(config: FlashForwardKernelConfig) -> float:
    """Registers beside O, S and a held Q."""
    overhead = OVERHEAD["constant"] + OVERHEAD["resident"] * config.resident_registers()
    overhead += OVERHEAD["row_tiles"] * (config.rows_per_warp // MMA_M)
    overhead += OVERHEAD["whole_K"] * (config.K_mma_load_K_tiles == 0)
    overhead += OVERHEAD["mbarrier"] * config.mbarrier
    overhead += OVERHEAD["waiting_copies"] * (not config.eager_load_blocks)
    overhead += OVERHEAD["plain_softmax"] * (not config.optimized_softmax)
    overhead += OVERHEAD["held_Q"] * (config.Q_mma_load_K_tiles == 0)
    return overhead + OVERHEAD["single_fragments"] * (config.fragments_ahead > 0)


def _ways(config: FlashForwardKernelConfig) -> dict[str, float]:
    """How many times as long each access takes by its bank conflicts; by the beginning of its name."""
    begins = ("K to", "V to", "Q to", "K, V into")
    if config.swizzled:
        return dict.fromkeys(begins, 1.0)
    accesses = shared_accesses(config)
    return {begin: next(a.ways for a in accesses if a.name.startswith(begin)) for begin in begins}
