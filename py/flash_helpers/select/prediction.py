"""How long a kernel is expected to take: clocks of each unit, blocks in turn, memory. It ranks kernels.

The time of one K/V block follows from what each unit of an SM has to do (``model.step_costs``). How much they
hide of one another, and what a block takes beside its steps, was fitted to the committed result files.
``flash-attention explain --model-error`` prints how far the predictions are from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of, kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import MAX_DECODE_ROWS, AttentionProblem
from flash_helpers.model.of import model_of
from flash_helpers.model.recorded import recorded_facts
from flash_helpers.model.resources import occupancy, predict_registers
from flash_helpers.model.step_costs import StepCosts, step_costs
from flash_helpers.model.work import work
from flash_helpers.select.candidates import numeric_class_of
from flash_helpers.select.splits import chunk_parts, n_splits

CLOCK_SHARE = 1.05  # of the datasheet's boost clock, which the cards pass while power allows
MODEL_ERROR = 0.05  # median error over the committed result files; a test compares
MEMORY_SHARE = 0.91  # of the datasheet's bandwidth

MANY_WAVES = 4  # from which on the last wave of thread blocks, full or not, is a small part of all

# Rates for devices whose datasheet is not known: ratios between kernels depend on them little.
DEFAULT_CLOCK_HZ = 1.5e9
DEFAULT_MMA_FLOPS_PER_SM_CLOCK = 2048.0
DEFAULT_BYTES_PER_SM_CLOCK = 12.0


@dataclass(frozen=True)
class Prediction:
    """The expected time of one kernel on one problem.

    Attributes:
        seconds: the time.
        blocks: thread blocks: query blocks of all heads and batch items, times n_splits.
        blocks_per_sm: blocks that one SM works on at a time.
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

    def against(self, chosen: Expected) -> str:
        """Why another kernel is chosen, for reasons; differences below the model's error do not count."""
        if isinstance(chosen, Unpredicted):
            return f"{self.text()}; measurements and a family's default go before the model"
        ratio = self.seconds / chosen.seconds
        if 1 / (1 + MODEL_ERROR) < ratio < 1 + MODEL_ERROR:
            margin = f"half of whose errors pass {100 * MODEL_ERROR:.0f} %"
            return f"{self.text()}: the model, {margin}, can't tell it from the chosen one"
        if ratio < 1:
            return (
                f"{self.text()}, {ratio:.2f} times the chosen one's; measurements and a family's default go "
                "before the model"
            )
        return f"{self.text()}: {ratio:.2f} times the chosen one's"


@dataclass(frozen=True)
class Unpredicted:
    """In the place of a prediction: kernels of a direction that has no cost model.

    Attributes:
        label: the direction's.
        seconds: comes behind every time.
    """

    label: str
    seconds: float = float("inf")
    n_splits: int = 1

    def text(self) -> str:
        """For reasons."""
        return f"no model says how long {self.label} kernels take"

    def against(self, chosen: Prediction | Unpredicted) -> str:
        """Why another kernel is chosen, for reasons."""
        return f"{self.text()}: what was measured, a default and what stands before it are taken first"


Expected = Prediction | Unpredicted


def expected(kernel: Kernel, problem: AttentionProblem, facts: DeviceFacts) -> Expected:
    """What is expected of a kernel, as of ``predict``, whether or not there is a model of its direction."""
    direction = direction_of(kernel)
    return predict(kernel, problem, facts) if direction.model else Unpredicted(direction.label)


def predict(kernel: Kernel, problem: AttentionProblem, facts: DeviceFacts) -> Prediction:
    """The time that a kernel is expected to take.

    Args:
        kernel: a kernel whose configuration fits the device.
        problem: the problem.
        facts: the device.
    """
    facts = with_rates(facts)
    per_sm = resident_blocks(kernel.config, facts)
    splits = "split" in direction_of(kernel).traits and kernel.traits.split
    parts = parts_of_keys(kernel, problem, facts) if splits else 1
    blocks = _row_blocks(kernel.config, problem) * parts
    waves = blocks / (max(per_sm, 1) * facts.sm_count)
    if not per_sm:
        return Prediction(float("inf"), blocks, per_sm, waves, parts)
    seconds = expected_seconds(kernel, problem, facts, per_sm, parts)
    return Prediction(seconds, blocks, per_sm, waves, parts)


def expected_seconds(
    kernel: Kernel,
    problem: AttentionProblem,
    facts: DeviceFacts,
    blocks_per_sm: int,
    parts: int = 1,
    costs: StepCosts | None = None,
) -> float:
    """The expected time, with what is known of the compiled kernel.

    Args:
        kernel, problem, facts: as in ``predict``; the device's rates are known.
        blocks_per_sm: resident thread blocks of an SM, at least 1.
        parts: that the keys are cut into.
        costs: of one step, from compiled code; None: predicted.
    """
    config, model = kernel.config, model_of(kernel.config)
    fit = model.fit
    done = work(config, problem)
    in_turn = done.blocks * parts / facts.sm_count
    resident = min(blocks_per_sm, max(1, ceil(in_turn)))
    step = _step_clocks(config, costs or _predicted_costs(config, facts), resident)
    block = (fit.next_item_clocks if model.begins_next_item(config) else fit.block_clocks) / resident
    steps = done.steps / (done.blocks * parts) if done.blocks else 0.0
    block += max(0.0, model.late_query_clocks(config) - max(0.0, steps - 1) * step)
    average = steps * step + block if done.blocks else 0.0
    if done.steps < done.longest * done.blocks:  # blocks of different lengths
        clocks = in_turn * average * (fit.uneven if model.static_rounds(config) else 1.0)
    else:
        clocks = ceil(in_turn) * average
    clocks = max(clocks, -(-done.longest // parts) * step + block if done.blocks else 0.0)
    units = clocks / (CLOCK_SHARE * facts.clock_hz)
    memory = done.min_bytes / (MEMORY_SHARE * facts.dram_bandwidth)
    seconds = _norm((units, memory), fit.memory_overlap) + fit.launch_seconds
    return seconds + (fit.combine_seconds if parts > 1 else 0.0)


def with_rates(facts: DeviceFacts) -> DeviceFacts:
    """The device, with ordinary rates where its datasheet is not known."""
    clock = facts.clock_hz or DEFAULT_CLOCK_HZ
    return replace(
        facts,
        clock_hz=clock,
        mma_flops=facts.mma_flops or DEFAULT_MMA_FLOPS_PER_SM_CLOCK * clock * facts.sm_count,
        dram_bandwidth=facts.dram_bandwidth or DEFAULT_BYTES_PER_SM_CLOCK * clock * facts.sm_count,
    )


def parts_of_keys(kernel: Kernel, problem: AttentionProblem, facts: DeviceFacts) -> int:
    """Parts that the keys are cut into; 1 where the thread blocks fill the GPU without that.

    Few queries wait for memory: there a last wave of few blocks, which cannot draw all of its bandwidth,
    costs more than parts do.

    Args:
        kernel: a kernel that can split keys and fits the device.
        problem: the problem.
        facts: the device.
    """
    config = kernel.config
    blocks, per_sm = _row_blocks(config, problem), max(resident_blocks(config, facts), 1)
    few = problem.seq_len_q <= MAX_DECODE_ROWS
    if blocks >= facts.sm_count * per_sm * (MANY_WAVES if few else 1):
        return 1
    if problem.invariant:  # where keys are cut is fixed
        return chunk_parts(problem, config.B_c * numeric_class_of(config).chunk_tiles)
    return n_splits(
        blocks,
        problem.batch * problem.n_heads * problem.seq_len_q,
        -(-problem.keys_of_block(config.B_r) // config.B_c),
        problem.d_head_v,
        sm_count=facts.sm_count,
        blocks_per_sm=per_sm,
    )


def _row_blocks(config: KernelConfig, problem: AttentionProblem) -> int:
    return work(config, problem).blocks


@lru_cache(1024)
def resident_blocks(config: KernelConfig, facts: DeviceFacts) -> int:
    """Thread blocks that one SM works on at a time."""
    if model_of(config).one_block_per_sm:
        return 1
    known = recorded_facts(kernel_of(config), facts.target)
    registers = known.registers if known else predict_registers(config).total
    return occupancy(config.n_warps, registers, config.smem_bytes(), facts).blocks


@lru_cache(1024)
def _predicted_costs(config: KernelConfig, facts: DeviceFacts) -> StepCosts:
    spilled = model_of(config).spilled_registers(predict_registers(config))
    return step_costs(config, facts, spilled_registers=spilled)


def _step_clocks(config: KernelConfig, costs: StepCosts, resident: int) -> float:
    """Clocks of an SM for one K/V block of one thread block, with others beside it."""
    model = model_of(config)
    units = (costs.matrix, costs.exp2, costs.shared_memory, costs.issue, costs.latency / resident)
    step = _norm(units, model.fit.overlap) + model.fit.step_clocks
    return model.fit.unhidden_copies * step if model.waits_for_copies(config) else step


def _norm(values: tuple[float, ...], power: float) -> float:
    longest = max(values)
    return longest * sum((value / longest) ** power for value in values) ** (1 / power) if longest else 0.0
