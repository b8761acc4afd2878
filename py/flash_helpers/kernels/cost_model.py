"""What a kernel costs, as the cost model of each direction says it; rates that all of them share.

Rates are of compute capability 8.0 to 9.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.shared_memory import SharedAccess
from flash_helpers.kernels.softmax import SoftmaxReference

MAX_REGISTERS = 255  # of a thread
FLOAT_BYTES = 4
WAVEFRONT_BYTES = 128  # what shared memory, which is also the L1 cache, moves in a clock
EXP2_PER_CLOCK = (
    16  # results of one SM; CUDA C++ programming guide, throughput of native arithmetic instructions
)

# Of an H100, from dependent chains of one instruction each; an A100's differ by a few clocks.
SHUFFLE_CLOCKS = 24
EXP2_CLOCKS = 40  # multiply-add, exp2, conversion to 16 bits


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


@dataclass(frozen=True)
class Fit:
    """What was fitted to measured times of one family.

    Attributes:
        overlap: the units' times add up in this norm: 1 would hide nothing, infinity all but the longest.
        memory_overlap: the same for memory's time and the SMs'.
        step_clocks: of a K/V block beside its units' work.
        unhidden_copies: factor on a step that waits for its own copies.
        block_clocks: of a block beside its steps: its first tiles, its output.
        next_item_clocks: the same where the next item begins before this one ends.
        uneven: factor where a mask makes blocks uneven and they are handed out in static rounds.
        launch_seconds: begin and end of a kernel.
        combine_seconds: of the second kernel that adds parts.
    """

    overlap: float
    memory_overlap: float
    step_clocks: float
    unhidden_copies: float
    block_clocks: float
    next_item_clocks: float
    uneven: float
    launch_seconds: float
    combine_seconds: float


class CostModel(ABC):
    """What the kernels of one direction cost, from their configuration alone.

    Attributes:
        fit: what was fitted to measured times.
        one_block_per_sm: whether a block takes all registers of an SM, however many the compiler uses.
        owns_keys: a block owns ``B_c`` keys of a kv head and takes tiles of ``B_r`` queries of its group one
            after the other; else it owns queries and takes keys.
    """

    fit: Fit
    one_block_per_sm: bool = False
    owns_keys: bool = False

    @abstractmethod
    def registers(self, config: Any) -> Registers:
        """A thread's registers."""

    @abstractmethod
    def matrix_share(self, facts: DeviceFacts) -> float:
        """Share of the datasheet's matrix rate that the instruction of its products reaches."""

    @abstractmethod
    def computing_warps(self, config: Any) -> int:
        """Warps of a block that compute."""

    @abstractmethod
    def wavefronts(self, config: Any) -> float:
        """Clocks of shared memory for one K/V block."""

    @abstractmethod
    def latency(self, config: Any, matrix: float) -> float:
        """Clocks of the chain that one warp goes through in one K/V block; ``matrix``: of the products."""

    @abstractmethod
    def instructions(self, config: Any) -> int:
        """Instructions that one warp executes for a K/V block."""

    @abstractmethod
    def shared_accesses(self, config: Any) -> list[SharedAccess]:
        """Every kind of access to shared memory; the worst warp and the worst tile of each."""

    def flop_of_pair(self, config: Any) -> int:
        """FLOP of one query and one key that it sees, of all products."""
        return 2 * (config.d_head + config.d_head_v)

    def bytes_of_sums(self, config: Any) -> int:
        """Bytes of one query and head that pass through memory beside the tensors."""
        return 0

    def added_bytes(self, config: Any) -> int:
        """Bytes of float32 sums that a step of the main kernel adds to in global memory."""
        return 0

    def bytes_around(self, config: Any) -> int:
        """Bytes of one query and head that kernels before and after the main one read and write."""
        return 0

    def takes_whole_heads(self, config: Any) -> bool:
        """Of kernels that own keys: a block takes all keys of a head, one tile after the other."""
        return False

    def register_lines(self, registers: Registers) -> list[tuple[str, str]] | None:
        """(what, value) where registers follow from the block alone; None: they are predicted."""
        return None

    def spilled_registers(self, registers: Registers) -> int:
        """Registers that each K/V block stores and loads where nothing is compiled yet."""
        return registers.predicted_spill

    def waits_for_copies(self, config: Any) -> bool:
        """Whether a step waits for its own copies."""
        return False

    def begins_next_item(self, config: Any) -> bool:
        """Whether the next item begins before this one ends."""
        return False

    def late_query_clocks(self, config: Any) -> float:
        """Clocks until a block's Q is there, where nothing asks for it before the block before has begun."""
        return 0.0

    def static_rounds(self, config: Any) -> bool:
        """Whether blocks take their work in static rounds."""
        return False


def backward_bytes_around(config: Any, clears_sums: bool) -> int:
    """Bytes of one query and head that the kernels of ``common/backward`` before and after the main one move.

    Args:
        config: a configuration of gradients.
        clears_sums: sums of dQ are cleared before, and rounded to dQ after.
    """
    itemsize = config.dtype.itemsize
    delta = 2 * itemsize * config.d_head_v + 3 * FLOAT_BYTES  # O, dO, the LSE; delta, the LSE in powers of 2
    return delta + (2 * FLOAT_BYTES + itemsize) * config.d_head * clears_sums


def softmax_instructions(
    reference: SoftmaxReference, elements: int, outputs: int, sums: int, folded_scale: bool
) -> int:
    """Instructions of one thread's softmax for a K/V block.

    Args:
        reference: which maxima it takes.
        elements: scores.
        outputs: that a rescale touches.
        sums: additions to the row sums.
        folded_scale: whether the scale is part of the multiply-add.
    """
    count = 2 * elements + elements // 2 + sums  # multiply-add, exp2, half a conversion, sum
    late = {SoftmaxReference.LAGGED: elements // 2, SoftmaxReference.LAGGED_BY_ROW: elements // 2}
    count += {SoftmaxReference.ANCHORED: 0, **late}.get(reference, elements)
    if reference == SoftmaxReference.EXACT:
        count += outputs
    return count if folded_scale else count + elements


def softmax_latency(reference: SoftmaxReference) -> float:
    """Row maximum over the four lanes of a row, unless it is not waited for; then exp2."""
    late = SoftmaxReference.ANCHORED, SoftmaxReference.LAGGED, SoftmaxReference.LAGGED_BY_ROW
    waits = reference not in late
    return EXP2_CLOCKS + (2 * SHUFFLE_CLOCKS if waits else 0)
