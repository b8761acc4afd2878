"""How long a kernel is expected to take: tiles, resident blocks, waves. It ranks; it does not promise."""

from __future__ import annotations

from dataclasses import dataclass

from flash_attention.problem import AttentionProblem
from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.kernel import ForwardConfig
from flash_helpers.explain.floors import EXP2_PER_CLOCK, MMA_SYNC_SHARE
from flash_helpers.explain.resources import Waves, occupancy, predict_registers
from flash_helpers.flops import visible_pairs

# Share of mma.sync's best rate by resident warps of an SM: 638, 629 and 556 TFLOP/s with 16, 8 and 4 warps,
# products alone (H100 80GB HBM3, 2026-11). Fewer warps: in proportion.
WARPS_SHARE = ((16, 1.0), (8, 0.986), (4, 0.871))

SMEM_BYTES_PER_CLOCK = 128  # what one SM reads of its shared memory
# Guesses, until measured times take their place:
EXP2_EXPOSED = 0.5  # of the exponentials' time that products of other warps do not hide
STEP_CLOCKS = 150  # of a step: barriers, row maxima, addresses
UNHIDDEN_COPIES = 1.15  # factor on a step that waits for its own copies (no eager loads)
LAUNCH_SECONDS = 4e-6  # start and end of a kernel, whatever its tile

# Rates for devices whose datasheet is not known: ratios between kernels depend on them little.
DEFAULT_CLOCK_HZ = 1.5e9
DEFAULT_MMA_FLOPS_PER_SM_CLOCK = 2048.0


@dataclass(frozen=True)
class Prediction:
    """The expected time of one kernel on one problem.

    Attributes:
        seconds: the time.
        blocks_per_sm: resident thread blocks of an SM.
        waves: how the grid fills the device.
        steps: K/V blocks a thread block visits, on average.
    """

    seconds: float
    blocks_per_sm: int
    waves: Waves
    steps: float

    def text(self) -> str:
        """For reasons: ``0.123 ms expected (528 blocks, 4 per SM, 1.00 waves)``."""
        return (
            f"{1e3 * self.seconds:.3g} ms expected ({self.waves.thread_blocks} blocks, "
            f"{self.blocks_per_sm} per SM, {self.waves.waves:.2f} waves)"
        )


def predict(config: ForwardConfig, problem: AttentionProblem, facts: DeviceFacts) -> Prediction:
    """Time of the whole waves, each as long as its blocks' products and exposed exponentials take one SM.

    Args:
        config: a configuration that fits the device.
        problem: the problem.
        facts: the device.
    """
    registers = predict_registers(config)
    resident = occupancy(config.n_warps, registers.total, config.smem_bytes(), facts)
    q_blocks = -(-problem.seq_len_q // config.B_r)
    blocks = problem.batch * problem.n_heads * q_blocks
    waves = Waves.of(blocks, resident.blocks, facts.sm_count)
    if not resident.blocks:
        return Prediction(float("inf"), 0, waves, 0.0)
    steps = _visited_share(problem) * -(-problem.seq_len_k // config.B_c)

    clock = facts.clock_hz or DEFAULT_CLOCK_HZ
    rate = facts.mma_flops / facts.sm_count or DEFAULT_MMA_FLOPS_PER_SM_CLOCK * clock
    rate *= MMA_SYNC_SHARE.get(facts.capability[0], 1.0) * _warps_share(resident.warps)
    pairs = config.B_r * config.B_c
    products = max(
        4 * pairs * config.d_head / rate, _smem_read_bytes(config) / (SMEM_BYTES_PER_CLOCK * clock)
    )
    step = products + EXP2_EXPOSED * pairs / (EXP2_PER_CLOCK * clock) + STEP_CLOCKS / clock
    if not config.eager_load_blocks:
        step *= UNHIDDEN_COPIES
    # Blocks resident together share the SM; the last wave takes as long as its fullest SM.
    in_turn = blocks // (resident.blocks * facts.sm_count) * resident.blocks
    rest = blocks % (resident.blocks * facts.sm_count)
    in_turn += -(-rest // facts.sm_count)
    return Prediction(in_turn * steps * step + LAUNCH_SECONDS, resident.blocks, waves, steps)


def _smem_read_bytes(config: ForwardConfig) -> int:
    """Fragments one step reads: every warp all of K and V, and its own rows of a Q that is not held."""
    streamed_q = config.B_r if config.Q_mma_load_K_tiles else 0
    rows = 2 * config.n_warps * config.B_c + streamed_q
    return rows * config.d_head * config.dtype.itemsize


def _visited_share(problem: AttentionProblem) -> float:
    """The share of all (query, key) pairs that is visible: what remains of a block's steps on average."""
    pairs = problem.seq_len_q * problem.seq_len_k
    if not pairs or not (problem.causal or problem.windowed):
        return 1.0
    window = (problem.left, problem.right)
    return visible_pairs(problem.seq_len_q, problem.seq_len_k, window=window) / pairs


def _warps_share(warps: int) -> float:
    for at_least, share in WARPS_SHARE:
        if warps >= at_least:
            return share
    fewest, share = WARPS_SHARE[-1]
    return share * warps / fewest
