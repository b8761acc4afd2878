"""The least time a problem can take by memory, by the matrix units, and by the exp2 unit."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.problem import Problem

# exp2 results of one SM in a clock: 16 on every GPU from compute capability 8.0 to 9.0
# (CUDA C++ programming guide, throughput of native arithmetic instructions).
EXP2_PER_CLOCK = 16

# What mma.sync reaches of the datasheet's matrix rate, by major compute capability. Hopper's full rate
# needs wgmma: mma.sync m16n8k16 was measured at 638 of 989 TFLOP/s with 16 warps an SM (H100, 2026-11).
MMA_SYNC_SHARE = {9: 638 / 989}


@dataclass(frozen=True)
class Work:
    """What a kernel executes, and the least it would have to.

    Attributes:
        flop: of the visible pairs, by the formula of ``flops``.
        executed_flop: of all tiles the kernel visits; masked parts of visited tiles are computed too.
        exponentials: executed pairs, one exp2 each.
        min_bytes: Q, K, V read once, O written once.
        l2_bytes: what the thread blocks read and write together: each reads its keys anew, from L2 at best.
    """

    flop: int
    executed_flop: int
    exponentials: int
    min_bytes: int
    l2_bytes: int


def work(config: ForwardConfig, problem: Problem) -> Work:
    """The work of one problem by one configuration, whose head size of V and O counts for both."""
    B_r, B_c, columns = config.B_r, config.B_c, config.d_head + config.d_head_v  # of Q and O, of K and V
    steps = block_steps(problem.seq_len, problem.seq_len_k, B_r, B_c, problem.causal)
    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    pairs = heads * steps * B_r * B_c
    itemsize = problem.dtype.itemsize
    return Work(
        flop=2 * heads * problem.pairs() * columns,
        executed_flop=2 * pairs * columns,
        exponentials=pairs,
        min_bytes=columns * itemsize * (heads * problem.seq_len + heads_kv * problem.seq_len_k),
        l2_bytes=heads * columns * itemsize * (problem.seq_len + steps * B_c),
    )


def block_steps(seq_len_q: int, seq_len_k: int, B_r: int, B_c: int, causal: bool) -> int:
    """The K/V blocks that are visited, summed over the Q blocks of one head.

    Under a causal mask (bottom-right aligned), block i visits the keys up to its last query's place.
    """
    all_keys = -(-seq_len_k // B_c)
    if not causal:
        return -(-seq_len_q // B_r) * all_keys
    offset = seq_len_k - seq_len_q
    whole = seq_len_q // B_r
    blind = min(whole, max(0, -offset // B_r))  # whole Q blocks that see no key
    first_keys = (blind + 1) * B_r + offset
    steps = _floor_sum(whole - blind, B_r, first_keys + B_c - 1, B_c)
    return steps + (all_keys if seq_len_q % B_r else 0)


def _floor_sum(count: int, step: int, start: int, divisor: int) -> int:
    """The sum of (start + i * step) // divisor over i < count, in steps as of Euclid's algorithm."""
    if count <= 0:
        return 0
    total = count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
    step, start = step % divisor, start % divisor
    end = start + count * step
    if end >= divisor:
        total += _floor_sum(end // divisor, divisor, end % divisor, step)
    return total


@dataclass(frozen=True)
class Floors:
    """Times that no kernel of this tiling can beat, milliseconds.

    Attributes:
        memory: min_bytes at the memory's bandwidth.
        matrix: executed FLOP at the rate of the matrix instruction the family uses.
        exp2: executed exponentials at the rate of the special function units.
        binding: the name of the longest.
    """

    memory: float
    matrix: float
    exp2: float
    binding: str

    @property
    def longest(self) -> float:
        """The floor that binds, milliseconds."""
        return max(self.memory, self.matrix, self.exp2)


def matrix_share(config: ForwardConfig, facts: DeviceFacts) -> float:
    """Share of the datasheet's matrix rate that a configuration's instruction reaches on a device."""
    if isinstance(config, HopperForwardKernelConfig):
        return 1.0  # wgmma
    return MMA_SYNC_SHARE.get(facts.capability[0], 1.0)


def floors(done: Work, facts: DeviceFacts, share: float) -> Floors:
    """The three floors of a piece of work on a device, by the datasheet's rates.

    Args:
        done: the work.
        facts: the device.
        share: of the datasheet's matrix rate, see ``matrix_share``.
    """
    times = {
        "memory": 1e3 * done.min_bytes / facts.dram_bandwidth,
        "matrix": 1e3 * done.executed_flop / (share * facts.mma_flops),
        "exp2": 1e3 * done.exponentials / (facts.sm_count * EXP2_PER_CLOCK * facts.clock_hz),
    }
    return Floors(**times, binding=max(times, key=lambda name: times[name]))
