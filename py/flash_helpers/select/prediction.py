"""How long a kernel is expected to take: tiles, resident blocks, waves. It ranks; it does not promise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flash_helpers.explain.floors import EXP2_PER_CLOCK, MMA_SYNC_SHARE
from flash_helpers.explain.resources import occupancy, predict_registers
from flash_helpers.flops import visible_pairs
from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.select.problem import AttentionProblem
from flash_helpers.select.splits import n_splits

# Share of mma.sync's best rate by resident warps of an SM: 638, 629 and 556 TFLOP/s with 16, 8 and 4 warps,
# products alone (H100 80GB HBM3, 2026-11). Fewer warps: in proportion.
WARPS_SHARE = ((16, 1.0), (8, 0.986), (4, 0.871))

SMEM_BYTES_PER_CLOCK = 128  # what one SM reads of its shared memory
# Guesses, until measured times take their place:
EXP2_EXPOSED = 0.5  # of the exponentials' time that products of other warps do not hide
STEP_CLOCKS = 150  # of a step: barriers, row maxima, addresses
UNHIDDEN_COPIES = 1.15  # factor on a step that waits for its own copies (no eager loads)
WGMMA_SHARE = 0.75  # of the datasheet's rate that a Hopper-family kernel reaches in its main loop
LAUNCH_SECONDS = 4e-6  # start and end of a kernel, whatever its tile

MAX_DECODE_ROWS = 64  # queries, or heads of a group, that one tile of the smallest kernels takes
MANY_WAVES = 4  # from which on the last wave of thread blocks, full or not, is a small part of all

# Rates for devices whose datasheet is not known: ratios between kernels depend on them little.
DEFAULT_CLOCK_HZ = 1.5e9
DEFAULT_MMA_FLOPS_PER_SM_CLOCK = 2048.0


@dataclass(frozen=True)
class Prediction:
    """The expected time of one kernel on one problem.

    Attributes:
        seconds: the time.
        blocks: thread blocks: query blocks of all heads and batch items, times n_splits.
        blocks_per_sm: of them that one SM works on at a time.
        waves: blocks over those that all SMs work on at a time.
        n_splits: parts that the keys are cut into.
    """

    seconds: float
    blocks: int
    blocks_per_sm: int
    waves: float
    n_splits: int = 1

    def text(self) -> str:
        """For reasons: ``0.123 ms expected (528 blocks, 4 per SM, 1.00 waves)``."""
        parts = f", keys in {self.n_splits} parts" if self.n_splits > 1 else ""
        return (
            f"{1e3 * self.seconds:.3g} ms expected ({self.blocks} blocks, {self.blocks_per_sm} per SM, "
            f"{self.waves:.2f} waves{parts})"
        )


def predict(kernel: ForwardKernel, problem: AttentionProblem, facts: DeviceFacts) -> Prediction:
    """Time of the blocks that the busiest SM computes, each step as long as its products take one SM.

    Args:
        kernel: a kernel whose configuration fits the device.
        problem: the problem.
        facts: the device.
    """
    config = kernel.config
    clock = facts.clock_hz or DEFAULT_CLOCK_HZ
    rate = facts.mma_flops / facts.sm_count or DEFAULT_MMA_FLOPS_PER_SM_CLOCK * clock  # of one SM
    per_sm = _blocks_per_sm(config, facts)
    if isinstance(config, HopperForwardKernelConfig):
        step = _hopper_step(config, rate)
    else:
        rate *= MMA_SYNC_SHARE.get(facts.capability[0], 1.0) * _warps_share(per_sm * config.n_warps)
        step = _ampere_step(config, rate, clock)
    blocks = _row_blocks(config, problem)
    at_a_time = max(per_sm, 1) * facts.sm_count
    parts, launches = 1, 1
    if kernel.traits.split:
        parts = parts_of_keys(kernel, problem, facts)
        blocks, launches = blocks * parts, 2  # the second one combines
    # Blocks resident together share the SM; the last wave takes as long as its fullest SM.
    in_turn = blocks // at_a_time * per_sm + -(-(blocks % at_a_time) // facts.sm_count)
    steps = _visible_share(problem) * -(-problem.seq_len_k // config.B_c) / parts
    seconds = in_turn * steps * step + launches * LAUNCH_SECONDS if per_sm else float("inf")
    return Prediction(seconds, blocks, per_sm, blocks / at_a_time, parts)


def parts_of_keys(kernel: ForwardKernel, problem: AttentionProblem, facts: DeviceFacts) -> int:
    """Parts that the keys are cut into; 1 where the thread blocks fill the GPU without that.

    Few queries wait for memory: there a last wave of few blocks, which cannot draw all of its bandwidth,
    costs more than parts do.

    Args:
        kernel: a kernel that can split keys and fits the device.
        problem: the problem.
        facts: the device.
    """
    config = kernel.config
    blocks, per_sm = _row_blocks(config, problem), max(_blocks_per_sm(config, facts), 1)
    few = problem.seq_len_q <= MAX_DECODE_ROWS
    if blocks >= facts.sm_count * per_sm * (MANY_WAVES if few else 1):
        return 1
    return n_splits(
        blocks,
        problem.batch * problem.n_heads * problem.seq_len_q,
        -(-problem.keys_of_block(config.B_r) // config.B_c),
        problem.d_head_v,
        sm_count=facts.sm_count,
        blocks_per_sm=per_sm,
    )


def _row_blocks(config: ForwardConfig, problem: AttentionProblem) -> int:
    return problem.batch * problem.n_heads * -(-problem.seq_len_q // config.B_r)


@lru_cache(1024)
def _blocks_per_sm(config: ForwardConfig, facts: DeviceFacts) -> int:
    """Resident thread blocks; one of the Hopper family takes an SM's registers."""
    if isinstance(config, HopperForwardKernelConfig):
        return 1
    registers = predict_registers(config).total
    return occupancy(config.n_warps, registers, config.smem_bytes(), facts).blocks


def _ampere_step(config: FlashForwardKernelConfig, rate: float, clock: float) -> float:
    """Seconds of one K/V block: products or the reads that feed them, and what they do not hide."""
    pairs = config.B_r * config.B_c
    # Every warp reads all of K and V, and its own rows of a Q that is not held.
    rows = 2 * config.n_warps * config.B_c + (config.B_r if config.Q_mma_load_K_tiles else 0)
    reads = rows * config.d_head * config.dtype.itemsize / (SMEM_BYTES_PER_CLOCK * clock)
    products = 4 * pairs * config.d_head / rate
    step = max(products, reads) + EXP2_EXPOSED * pairs / (EXP2_PER_CLOCK * clock) + STEP_CLOCKS / clock
    return step if config.eager_load_blocks else UNHIDDEN_COPIES * step


def _hopper_step(config: HopperForwardKernelConfig, rate: float) -> float:
    """Seconds of one K/V block: products that read shared memory themselves, with the softmax under them."""
    return 2 * config.B_r * config.B_c * (config.d_head + config.d_head_v) / (WGMMA_SHARE * rate)


def _visible_share(problem: AttentionProblem) -> float:
    """The share of all (query, key) pairs that is visible: what remains of a block's steps on average."""
    pairs = problem.seq_len_q * problem.seq_len_k
    if not pairs or not problem.masked:
        return 1.0
    window = (problem.left, problem.right)
    return visible_pairs(problem.seq_len_q, problem.seq_len_k, window=window) / pairs


def _warps_share(warps: int) -> float:
    for at_least, share in WARPS_SHARE:
        if warps >= at_least:
            return share
    fewest, share = WARPS_SHARE[-1]
    return share * warps / fewest
