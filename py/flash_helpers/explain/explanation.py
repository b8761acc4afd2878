"""Puts together what is known about one kernel on one problem and one device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flash_helpers.explain.rejected import Rejected, nearest_rejected
from flash_helpers.kernels.cost_model import Registers
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.kernels.shared_memory import SharedAccess
from flash_helpers.model.bank_conflicts import shared_accesses
from flash_helpers.model.bounds import Bound, Bounds, around, bounds, launch_reason
from flash_helpers.model.of import model_of
from flash_helpers.model.recorded import CompiledFacts, recorded_facts
from flash_helpers.model.resources import Occupancy, Waves, occupancy, predict_registers
from flash_helpers.model.step_costs import LoopFacts, StepCosts, step_costs
from flash_helpers.model.work import Work, work
from flash_helpers.problem import Problem
from flash_helpers.select.candidates import (
    class_reason,
    is_split,
    kernel_for,
    numeric_class_of,
    row_obstacle,
    split_variant,
    unable_reason,
)
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.prediction import expected_seconds, parts_of_keys, with_rates
from flash_helpers.select.select import invariant_class


@dataclass(frozen=True)
class Compiled(CompiledFacts):
    """What the compiler made of a kernel, with its main loop.

    Attributes:
        main_loop: instructions of the main loop by class; empty: no disassembler, or it was not looked at.
        note: why something is missing.
    """

    main_loop: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Performance:
    """What a kernel can do on a device that runs it. Times in milliseconds.

    Attributes:
        occupancy: by the compiled registers where they are known, else by the predicted ones.
        waves, costs, bounds: see their classes.
        expected: the predicted time.
        parts: that the keys are cut into.
        around: the least time of the kernels before and after it, on top of the bounds; None: there are none.
    """

    occupancy: Occupancy
    waves: Waves
    costs: StepCosts
    bounds: Bounds
    expected: float
    parts: int
    around: Bound | None = None


@dataclass(frozen=True)
class Explanation:
    """Everything that ``flash-attention explain`` shows of a kernel.

    Attributes:
        kernel: the configuration and the traits that the problem needs.
        problem, device: what it is explained for.
        infeasible: why it can't compute the problem on the device, or None.
        registers: the prediction; None, as ``work`` and ``performance``: the direction has no cost model.
        compiled: what the compiler made of it, where that is known.
        smem_bytes: shared memory of a block.
        work: what it executes.
        performance: None where it can't run.
        accesses, rejected: see their classes.
    """

    kernel: Kernel
    problem: AttentionProblem
    device: DeviceFacts
    infeasible: str | None
    registers: Registers | None
    compiled: CompiledFacts | None
    smem_bytes: int
    work: Work | None
    performance: Performance | None
    accesses: tuple[SharedAccess, ...]
    rejected: tuple[Rejected, ...]

    @property
    def attainable_tflops(self) -> float | None:
        """FLOP of the problem over its longest bound, 10^12 a second."""
        if self.performance is None or self.work is None:
            return None
        return self.work.flop / self.performance.bounds.longest / 1e9

    @property
    def numeric_class(self) -> NumericClass | None:
        """What the bits of a query's results depend on; None: a kernel of gradients has no class."""
        return numeric_class_of(self.kernel.config) if self.problem.direction == FORWARD else None

    @property
    def invariant_obstacle(self) -> str | None:
        """Why ``numerics="invariant"`` takes no kernel of this class for the problem, or None."""
        own, problem = self.numeric_class, replace(self.problem, invariant=True)
        if own is None:
            return "it is about the forward pass"
        try:
            return row_obstacle(own, problem) or class_reason(own, invariant_class(problem, self.device))
        except NoKernelError as error:
            return str(error)

    @property
    def main_loop(self) -> dict[str, int]:
        """Compiled instructions by class; empty where they are not known."""
        return self.compiled.main_loop if isinstance(self.compiled, Compiled) else {}

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is predicted and what is compiled apart."""
        p = self.performance
        return {
            "kernel": self.kernel.short_form(),
            "problem": {**asdict(self.problem), "dtype": self.problem.dtype.name},
            "device": asdict(self.device),
            "infeasible": self.infeasible,
            "registers_predicted": asdict(self.registers) if self.registers else None,
            "compiled": asdict(self.compiled) if self.compiled else None,
            "smem_bytes": self.smem_bytes,
            "numeric_class": str(self.numeric_class) if self.numeric_class else None,
            "invariant_obstacle": self.invariant_obstacle,
            "work": asdict(self.work) if self.work else None,
            "occupancy": p.occupancy.to_json() if p else None,
            "waves": asdict(p.waves) if p else None,
            "clocks_per_block": asdict(p.costs) if p else None,
            "bounds_ms": {b.name: b.milliseconds for b in p.bounds.all} if p else None,
            "binding": [b.name for b in p.bounds.binding] if p else None,
            "around_ms": p.around.milliseconds if p and p.around else None,
            "expected_ms": p.expected if p else None,
            "parts": p.parts if p else None,
            "attainable_tflops": self.attainable_tflops,
            "shared_accesses": [{**asdict(a), "ways": a.ways} for a in self.accesses],
            "rejected": [
                {"kernel": r.config.short_form(), "change": r.change, "reason": r.reason}
                for r in self.rejected
            ],
        }


def explain(
    config: KernelConfig,
    problem: Problem | AttentionProblem,
    facts: DeviceFacts,
    compiled: CompiledFacts | None = None,
    split: bool = False,
    neighbours: bool = True,
) -> Explanation:
    """Explains a configuration; needs neither a GPU nor, without ``compiled``, a compiler.

    Args:
        config: the configuration.
        problem: sizes and features; dtype and head sizes must be the configuration's.
        facts: the device, e.g. ``device_facts("H100")``.
        compiled: what is known of the compiled kernel; None: what is recorded, else nothing.
        split: explain the kernel that cuts keys into parts.
        neighbours: also look for neighbours that are rejected, and for bank conflicts.

    Raises:
        ValueError: the configuration is for another dtype or head size, or is malformed.
    """
    if isinstance(problem, Problem):
        problem = replace(attention_problem(problem), d_head_v=config.d_head_v)
    _check_sizes(config, problem)
    if malformed := config.malformed_reason():
        raise ValueError(f"{config.short_form()} can't be built: {malformed}")
    kernel = kernel_for(config, problem)
    if split:
        variant = split_variant(kernel)
        if variant is None:
            raise ValueError(f"{config.short_form()} can't cut keys into parts: leave --split away")
        kernel = variant
    compiled = compiled or recorded_facts(kernel, facts.target)
    modelled = direction_of(config).model is not None
    done, registers = (work(config, problem), predict_registers(config)) if modelled else (None, None)
    infeasible = (
        unable_reason(config, problem, [config])
        or config.infeasible_reason(facts)
        or (None if done is None else launch_reason(config, done))
    )
    performance = None
    if infeasible is None and done is not None and registers is not None:
        performance = _performance(kernel, problem, facts, done, registers, compiled)
    return Explanation(
        kernel=kernel,
        problem=problem,
        device=facts,
        infeasible=infeasible,
        registers=registers,
        compiled=compiled,
        smem_bytes=config.smem_bytes(),
        work=done,
        performance=performance,
        accesses=tuple(shared_accesses(config)) if neighbours and modelled else (),
        rejected=tuple(nearest_rejected(config, facts)) if neighbours else (),
    )


def kernel_costs(
    config: KernelConfig, facts: DeviceFacts, registers: Registers, compiled: CompiledFacts | None
) -> StepCosts:
    """Clocks of one K/V block: by the compiled main loop where it is known, else predicted."""
    loop = None
    if compiled is not None and compiled.instructions:
        loop = LoopFacts(compiled.instructions, compiled.local_wavefronts)
    spilled = 0 if compiled else model_of(config).spilled_registers(registers)
    return step_costs(config, facts, loop, spilled)


def _performance(
    kernel: Kernel,
    problem: AttentionProblem,
    facts: DeviceFacts,
    done: Work,
    registers: Registers,
    compiled: CompiledFacts | None,
) -> Performance:
    config, facts = kernel.config, with_rates(facts)
    used = compiled.registers if compiled else registers.total
    resident = occupancy(config.n_warps, used, config.smem_bytes(), facts)
    parts = parts_of_keys(kernel, problem, facts) if is_split(kernel) else 1
    costs = kernel_costs(config, facts, registers, compiled)
    blocks = max(1, resident.blocks)
    return Performance(
        occupancy=resident,
        waves=Waves.of(done.blocks * parts, resident.blocks, facts.sm_count),
        costs=costs,
        bounds=bounds(config, done, costs, facts, blocks, parts),
        expected=1e3 * expected_seconds(kernel, problem, facts, blocks, parts, costs),
        parts=parts,
        around=around(done, facts),
    )


def _check_sizes(config: KernelConfig, problem: AttentionProblem) -> None:
    wanted = (config.dtype, config.d_head, config.d_head_v)
    if wanted != (problem.dtype, problem.d_head, problem.d_head_v):
        raise ValueError(
            f"{config.short_form()} is for {config.dtype.name} and d_head {config.d_head}; the problem has "
            f"{problem.dtype.name} and d_head {problem.d_head}"
        )


def compile_facts(kernel: Kernel, target: int) -> Compiled:
    """Compiles one kernel (or finds it in the cache) and reads what came out.

    Raises:
        flash_helpers.build.BuildError: no compiler, or it refuses the kernel.
    """
    from flash_helpers.build import build_library
    from flash_helpers.build.gates import machine_code
    from flash_helpers.build.loop_facts import kernel_loop, local_wavefronts
    from flash_helpers.build.sass import DisassemblerNotFoundError, count_classes

    result = build_library([kernel], target, jobs=1)
    (facts,) = result.kernels
    source = "compiled just now" if not facts.cached else "compiled, from the kernel cache"
    try:
        body = machine_code(result.path, [kernel])[kernel]
    except (DisassemblerNotFoundError, ValueError) as error:
        return Compiled(facts.registers, facts.spill_bytes, source=source, note=str(error))
    loop = kernel_loop(kernel, body)
    if not loop:
        note = f"no loop holds the {kernel.config.products_per_block} products of one K/V block"
        return Compiled(facts.registers, facts.spill_bytes, source=source, note=note)
    return Compiled(
        facts.registers,
        facts.spill_bytes,
        instructions=sum(i.name != "NOP" for i in loop),
        local_wavefronts=local_wavefronts(loop),
        source=source,
        main_loop=count_classes(loop),
    )
