"""What the Hopper family's backward kernels cost."""

from __future__ import annotations

from flash_helpers.kernels.cost_model import (
    EXP2_CLOCKS,
    EXP2_PER_CLOCK,
    FLOAT_BYTES,
    MAX_REGISTERS,
    WAVEFRONT_BYTES,
    CostModel,
    Fit,
    Registers,
    backward_bytes_around,
)
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.resources import (
    DQ_B_R,
    WARPGROUP_ROWS,
    WARPGROUP_SIZE,
    DqOutput,
    consumer_registers,
    dq_columns,
    register_overhead,
)
from flash_helpers.kernels.shared_memory import CHUNK_BYTES, WARP_SIZE, SharedAccess, access, smem_offset

SM_REGISTERS = 65536
REGISTER_UNIT = 8  # a thread's registers are rounded to this
WGMMA_CLOCKS = 64  # what a chain of wgmma takes beside its products (H100)
OTHER_INSTRUCTIONS = 200  # of a warp and step: addresses, waits, the loop; found by compiling
PER_SCORE = 6  # multiply-add, exponential, difference, product, two halves of conversions, its share of loads
SUM_BYTES = 8  # of an element of dQ: its sum is cleared and, in the end, read


class HopperBackwardModel(CostModel):
    """One block an SM; two warpgroups compute, operands are read by ``wgmma`` itself.

    Where dQ has a kernel of its own its work is spread over the steps of the other.
    """

    # H200, 2026-11: half of 42 times are predicted within 5 %, all within 18 %.
    fit = Fit(3.0, 3.0, 600.0, 1.0, 5000.0, 5000.0, 1.2, 8.0e-5, 0.0)
    one_block_per_sm = True
    owns_keys = True

    def registers(self, config: HopperBackwardKernelConfig) -> Registers:
        """A consumer thread: its budget is fixed, its overhead was found by compiling."""
        budget, resident = consumer_registers(config), config.resident_registers()
        overhead = register_overhead(config)
        at_launch = SM_REGISTERS // config.n_threads // REGISTER_UNIT * REGISTER_UNIT
        return Registers(
            accumulators=resident,
            held_Q=0,
            overhead=overhead,
            total=min(at_launch, MAX_REGISTERS),
            budget=budget,
            predicted_spill=max(0, resident + overhead - budget),
        )

    def register_lines(self, registers: Registers) -> list[tuple[str, str]]:
        """A consumer's, and what the block's threads leave at launch."""
        r = registers
        parts = f"{r.accumulators} gradients, scores and P, {r.overhead} other, of {r.budget}"
        return [("registers, consumer", parts), ("registers, launch", f"{r.total} by the block's threads")]

    def spilled_registers(self, registers: Registers) -> int:
        """None: a configuration that would spill is refused."""
        return 0

    def matrix_share(self, facts: DeviceFacts) -> float:
        """Of ``wgmma``: all."""
        return 1.0

    def computing_warps(self, config: HopperBackwardKernelConfig) -> int:
        """Those of the consumers."""
        return 4 * config.n_consumers

    def flop_of_pair(self, config: HopperBackwardKernelConfig) -> int:
        """S, dP, dV, dK and dQ; S and dP once more where dQ has a kernel."""
        again = 0 if config.sums_dq else 2 * (config.d_head + config.d_head_v)
        return 2 * (3 * config.d_head + 2 * config.d_head_v) + again

    def bytes_of_sums(self, config: HopperBackwardKernelConfig) -> int:
        """Of one query and head, beside the tensors: sums are cleared, and read in the end."""
        return SUM_BYTES * config.d_head if _clears_sums(config) else 0

    def added_bytes(self, config: HopperBackwardKernelConfig) -> int:
        """Of dQ, unless it has a kernel."""
        return FLOAT_BYTES * config.B_r * config.d_head if config.sums_dq else 0

    def bytes_around(self, config: HopperBackwardKernelConfig) -> int:
        """None where dQ has a kernel, which computes delta on its way."""
        return backward_bytes_around(config, _clears_sums(config)) if config.sums_dq else 0

    def takes_whole_heads(self, config: HopperBackwardKernelConfig) -> bool:
        """With sums that a block keeps."""
        return config.dq_output == DqOutput.BLOCK_SUMS

    def wavefronts(self, config: HopperBackwardKernelConfig) -> float:
        """Operands of wgmma, tiles that TMA writes, dS, staged dQ, P that is handed on, LSE and delta.

        P and dS are operands in registers. Of one step of the main kernel, with its share of dQ's kernel.
        """
        columns = config.d_head + config.d_head_v
        rows = WARPGROUP_ROWS + 2 * config.B_r  # of S and dV, or of dP and dK
        groups = 1 if config.split_gradients else config.n_consumers
        elements = groups * rows * columns + config.B_r * columns
        moved = float(config.dtype.itemsize * elements)
        moved += 2 * FLOAT_BYTES * config.B_r * 4 * config.n_consumers  # by each warp, eight lanes each
        if config.split_gradients:
            moved += 2 * config.B_c * config.B_r * (FLOAT_BYTES if config.float_p else 2)
        if config.sums_dq:
            ds, part = config.B_c * config.B_r, config.B_c * (WARPGROUP_ROWS + dq_columns(config))
            moved += config.dtype.itemsize * (ds + config.n_consumers * part)
            if config.dq_output.is_staged:
                moved += 2 * FLOAT_BYTES * config.B_r * config.d_head
        else:
            moved += _dq_kernel_bytes(config)
        return moved / WAVEFRONT_BYTES

    def latency(self, config: HopperBackwardKernelConfig, matrix: float) -> float:
        """S, exponentials, dS, dK: with turns and dQ late the rest runs under the other warpgroup's."""
        softmax = WARPGROUP_ROWS * config.B_r / EXP2_PER_CLOCK + 2 * EXP2_CLOCKS
        return 3 * WGMMA_CLOCKS + matrix / config.n_consumers + softmax

    def instructions(self, config: HopperBackwardKernelConfig) -> int:
        """Products, exponentials and dS; of dQ's kernel the same share."""
        scores = WARPGROUP_ROWS * config.B_r // WARPGROUP_SIZE
        kernels = 1 if config.sums_dq else 2
        return kernels * (config.products_per_block + PER_SCORE * scores + OTHER_INSTRUCTIONS)

    def shared_accesses(self, config: HopperBackwardKernelConfig) -> list[SharedAccess]:
        """Its own threads store dS: one stmatrix.x4 is 16 keys of two chunks of queries."""
        if not config.sums_dq:
            return []
        places = [
            [smem_offset(config.B_c, row + lane % 16, chunk + lane // 16, True) for lane in range(WARP_SIZE)]
            for row in range(0, config.B_c, 16)
            for chunk in range(0, config.B_r // 8, 2)
        ]
        return [access("dS into shared memory, stmatrix", places, CHUNK_BYTES)]

    def static_rounds(self, config: HopperBackwardKernelConfig) -> bool:
        """Without a counter that hands out items."""
        return not config.dynamic_schedule


def _clears_sums(config: HopperBackwardKernelConfig) -> bool:
    """Whether sums are cleared before and rounded after; those that a block keeps stay in the L2 cache."""
    return config.sums_dq and config.dq_output != DqOutput.BLOCK_SUMS


def _dq_kernel_bytes(config: HopperBackwardKernelConfig) -> float:
    """What dQ's kernel moves for as many scores as a step of the main kernel has."""
    columns = config.d_head + config.d_head_v
    keys = config.n_consumers * (WARPGROUP_ROWS + config.dq_B_c) * columns  # S and dP
    elements = keys + config.n_consumers * config.dq_B_c * config.d_head + config.dq_B_c * columns
    return config.dtype.itemsize * elements * (config.B_r * config.B_c) / (DQ_B_R * config.dq_B_c)
