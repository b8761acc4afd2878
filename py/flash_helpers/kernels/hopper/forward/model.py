"""What the Hopper family's forward kernels cost."""

from __future__ import annotations

from flash_helpers.kernels.cost_model import (
    EXP2_PER_CLOCK,
    MAX_REGISTERS,
    WAVEFRONT_BYTES,
    CostModel,
    Fit,
    Registers,
    softmax_instructions,
    softmax_latency,
)
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.hopper.forward.resources import (
    REGISTER_OVERHEAD,
    REGISTERS,
    WARPGROUP_ROWS,
    WARPGROUP_SIZE,
)
from flash_helpers.kernels.hopper.forward.rules import MMA_K
from flash_helpers.kernels.shared_memory import CHUNK_BYTES, WARP_SIZE, SharedAccess, access, smem_offset

SM_REGISTERS = 65536
REGISTER_UNIT = 8  # a thread's registers are rounded to this
WGMMA_CLOCKS = 64  # what a chain of wgmma takes beside its products (H100)
# From asking for Q to having it while memory is busy, with the store of O that frees the slot (H200, items of
# one tile: h200-row-candidates.json).
LATE_QUERY_CLOCKS = 3000.0
OTHER_INSTRUCTIONS = 100  # of a warp and K/V block: addresses, waits, the loop; found by compiling


class HopperForwardModel(CostModel):
    """One block an SM; consumer warpgroups compute, operands are read by ``wgmma`` itself."""

    fit = Fit(2.4, 3.0, 0.0, 1.0, 3100.0, 1800.0, 1.32, 4.1e-6, 1.6e-6)  # H100 and H200, 2026-11
    one_block_per_sm = True

    def registers(self, config: HopperForwardKernelConfig) -> Registers:
        """A consumer thread: its budget is fixed, its overhead was found by compiling."""
        accumulators = (config.B_c + config.d_head_v) // 2
        held_P = config.resident_registers() - accumulators
        overhead = REGISTER_OVERHEAD[config.n_consumers]
        _, budget = REGISTERS[config.n_consumers]
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

    def register_lines(self, registers: Registers) -> list[tuple[str, str]]:
        """A consumer's, and what the block's threads leave at launch."""
        r = registers
        parts = f"{r.accumulators} O and S, {r.held_P} P, {r.overhead} other, of {r.budget}"
        return [("registers, consumer", parts), ("registers, launch", f"{r.total} by the block's threads")]

    def spilled_registers(self, registers: Registers) -> int:
        """None: a configuration that would spill is refused."""
        return 0

    def matrix_share(self, facts: DeviceFacts) -> float:
        """Of ``wgmma``: all."""
        return 1.0

    def computing_warps(self, config: HopperForwardKernelConfig) -> int:
        """Those of the consumers."""
        return 4 * config.n_consumers

    def wavefronts(self, config: HopperForwardKernelConfig) -> float:
        """Operands of wgmma, and tiles that TMA writes.

        A step of Q K^T reads 64 x 16 of Q, unless registers hold it, and B_c x 16 of K; one of P V reads 16 x
        d_head_v of V. Each warpgroup reads its own.
        """
        steps = config.d_head // MMA_K
        q = WARPGROUP_ROWS * MMA_K * (steps - config.q_register_steps)
        k, v = config.B_c * config.d_head, config.B_c * config.d_head_v
        elements = config.n_consumers * (q + k + v) + k + v
        return config.dtype.itemsize * elements / WAVEFRONT_BYTES

    def latency(self, config: HopperForwardKernelConfig, matrix: float) -> float:
        """One warpgroup's products have the matrix units for themselves; its softmax issues on its slots."""
        own = matrix / config.n_consumers
        scores = own * config.d_head / (config.d_head + config.d_head_v)
        softmax = WARPGROUP_ROWS * config.B_c / EXP2_PER_CLOCK + softmax_latency(config.softmax_reference)
        if config.overlap_products:  # P V of the tile before runs under the softmax
            return WGMMA_CLOCKS + scores + max(softmax, own - scores)
        return 2 * WGMMA_CLOCKS + own + softmax

    def instructions(self, config: HopperForwardKernelConfig) -> int:
        """Products and softmax."""
        elements = WARPGROUP_ROWS * config.B_c // WARPGROUP_SIZE
        outputs = WARPGROUP_ROWS * config.d_head_v // WARPGROUP_SIZE
        softmax = softmax_instructions(config.softmax_reference, elements, outputs, elements, True)
        return config.products_per_block + softmax + OTHER_INSTRUCTIONS

    def shared_accesses(self, config: HopperForwardKernelConfig) -> list[SharedAccess]:
        """Its own threads address shared memory only to stage O: one stmatrix.x4 is 16 rows of two chunks."""
        if config.direct_store:
            return []
        places = [
            [smem_offset(config.B_r, row + lane % 16, chunk + lane // 16, True) for lane in range(WARP_SIZE)]
            for row in range(0, config.B_r, 16)
            for chunk in range(0, config.d_head_v // 8, 2)
        ]
        return [access("O into shared memory, stmatrix", places, CHUNK_BYTES)]

    def begins_next_item(self, config: HopperForwardKernelConfig) -> bool:
        """As the field says."""
        return config.next_item != NextItem.NONE

    def late_query_clocks(self, config: HopperForwardKernelConfig) -> float:
        """Two slots hold Q of an item that ends and of the next, which begins: that behind has none yet."""
        none_ahead = self.begins_next_item(config) and not config.direct_store and config.q_stages == 2
        return LATE_QUERY_CLOCKS if none_ahead else 0.0

    def static_rounds(self, config: HopperForwardKernelConfig) -> bool:
        """Without a counter that hands out items."""
        return not config.dynamic_schedule
