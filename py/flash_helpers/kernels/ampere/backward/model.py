"""What the Ampere family's backward kernels cost."""

from __future__ import annotations

from flash_helpers.kernels.ampere.backward.accesses import shared_accesses
from flash_helpers.kernels.ampere.backward.config import (
    MAX_REGISTERS,
    WARP_SIZE,
    DQSum,
    FlashBackwardKernelConfig,
)
from flash_helpers.kernels.ampere.backward.sets import REGISTER_OVERHEAD
from flash_helpers.kernels.ampere.rates import BARRIER_CLOCKS, LOAD_CLOCKS, MMA_CLOCKS, MMA_SYNC_SHARE
from flash_helpers.kernels.cost_model import (
    EXP2_CLOCKS,
    FLOAT_BYTES,
    WAVEFRONT_BYTES,
    CostModel,
    Fit,
    Registers,
    backward_bytes_around,
)
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.shared_memory import SharedAccess

# Instructions of a warp and tile beside products, fragments, scores and copies: addresses, waits, the loop.
OTHER_INSTRUCTIONS = 200
PER_SCORE = 3  # multiply-add, exponential, half a conversion; or difference, product, half a conversion
MATRIX_BYTES = 512  # what an ldmatrix.x4 brings
SUM_BYTES = 8  # of an element of dQ: its sum is cleared and, in the end, read


class AmpereBackwardModel(CostModel):
    """Score warps and gradient warps; every operand passes through shared memory."""

    # Norm and clocks of a tile: H200, 2026-11; half of 176 times are predicted within 10 %, all within 36 %.
    fit = Fit(1.6, 2.0, 900.0, 1.2, 8500.0, 8500.0, 1.0, 8.0e-6, 0.0)
    owns_keys = True

    def registers(self, config: FlashBackwardKernelConfig) -> Registers:
        """The compiler takes all that a thread may have where sums leave it anything to hold."""
        resident = max(config.resident_registers(), config.dq_resident_registers())
        needed = resident + REGISTER_OVERHEAD
        held = config.keys_per_warp * max(config.d_head * config.holds_K, config.d_head_v * config.holds_V)
        return Registers(
            accumulators=resident - held // (2 * WARP_SIZE),
            held_Q=0,
            overhead=min(needed, MAX_REGISTERS) - resident,
            total=min(needed + REGISTER_OVERHEAD, MAX_REGISTERS),
            predicted_spill=max(0, needed - MAX_REGISTERS),
        )

    def matrix_share(self, facts: DeviceFacts) -> float:
        """Of ``mma.sync``."""
        return MMA_SYNC_SHARE.get(facts.capability[0], 1.0)

    def computing_warps(self, config: FlashBackwardKernelConfig) -> int:
        """All of them."""
        return config.n_warps

    def flop_of_pair(self, config: FlashBackwardKernelConfig) -> int:
        """S, dP, dV, dK and dQ; S and dP once more where dQ has a kernel."""
        again = 2 * (config.d_head + config.d_head_v) if config.has_dq_kernel else 0
        return 2 * (3 * config.d_head + 2 * config.d_head_v) + again

    def bytes_of_sums(self, config: FlashBackwardKernelConfig) -> int:
        """Of one query and head, beside the tensors: sums in any order are cleared, and read in the end."""
        return SUM_BYTES * config.d_head if config.dq_sum == DQSum.ATOMIC else 0

    def added_bytes(self, config: FlashBackwardKernelConfig) -> int:
        """Of dQ, unless it has a kernel."""
        return 0 if config.has_dq_kernel else FLOAT_BYTES * config.B_r * config.d_head

    def bytes_around(self, config: FlashBackwardKernelConfig) -> int:
        """Of delta, and of sums in any order; ordered ones are neither cleared nor rounded by others."""
        return backward_bytes_around(config, config.dq_sum == DQSum.ATOMIC)

    def wavefronts(self, config: FlashBackwardKernelConfig) -> float:
        """The operands of all products, P from warp to warp, dS, and the copies; of one tile of queries.

        The ways of the most conflicting access stand for all where shared memory is not swizzled.
        """
        ways = max(a.ways for a in shared_accesses(config))
        moved = _operand_bytes(config) + _exchanged_bytes(config)
        moved += 2 * config.B_r * (config.d_head + config.d_head_v)
        return ways * moved / WAVEFRONT_BYTES

    def latency(self, config: FlashBackwardKernelConfig, matrix: float) -> float:
        """S, exponentials, P handed on, dS, dK: products that add to the same registers follow each other."""
        steps = (config.d_head + 2 * config.B_r) // 16
        return 4 * LOAD_CLOCKS + MMA_CLOCKS * steps + EXP2_CLOCKS + 3 * BARRIER_CLOCKS

    def instructions(self, config: FlashBackwardKernelConfig) -> int:
        """Of one warp, on average of both roles; of the kernel that makes dQ, half of its products' share."""
        fragments = _operand_bytes(config) // MATRIX_BYTES // config.n_warps
        scores = config.B_r * config.B_c // (WARP_SIZE * config.role_warps)
        products = self.flop_of_pair(config) * config.B_r * config.B_c // (4096 * config.n_warps)
        return products + fragments + PER_SCORE * scores + OTHER_INSTRUCTIONS

    def shared_accesses(self, config: FlashBackwardKernelConfig) -> list[SharedAccess]:
        """See ``accesses``."""
        return shared_accesses(config)

    def waits_for_copies(self, config: FlashBackwardKernelConfig) -> bool:
        """With one stage the next Q and dO are copied when this tile's are used up."""
        return config.stages == 1


def _operand_bytes(config: FlashBackwardKernelConfig) -> int:
    """Read by ldmatrix for one tile of queries. A warp reads A for its rows and B for its columns."""
    keys, share, warps = config.keys_per_warp, config.warps_per_group, config.role_warps
    queries = config.B_r // share
    total = 0
    for d, held in ((config.d_head, config.holds_K), (config.d_head_v, config.holds_V)):
        total += warps * 2 * d * (queries + (0 if held else keys))  # S, dP
        columns = d // share
        total += warps * 2 * config.B_r * (columns + (keys if config.paired_warps else 0))  # dV, dK
    if not config.has_dq_kernel:
        row_warps = config.B_r // 32
        columns = config.d_head * row_warps // config.dq_tile_warps
        return total + config.dq_tile_warps * 2 * config.B_c * (32 + columns)
    rows = config.dq_B_r // config.dq_n_warps
    per_pair = (
        2 * (config.d_head + config.d_head_v) * (rows + config.dq_B_c) + 2 * config.d_head * config.dq_B_c
    )
    own = config.dq_n_warps * per_pair  # of dq_B_r x dq_B_c pairs
    return total + own * (config.B_r * config.B_c) // (config.dq_B_r * config.dq_B_c)


def _exchanged_bytes(config: FlashBackwardKernelConfig) -> int:
    """P written and read, dS written."""
    tile = 2 * config.B_r * config.B_c
    return 2 * tile + (tile if config.paired_warps or not config.has_dq_kernel else 0)
