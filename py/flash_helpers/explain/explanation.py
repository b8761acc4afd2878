"""Puts together what is known about one configuration on one problem and one device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flash_helpers.explain.bank_conflicts import SharedAccess, shared_accesses
from flash_helpers.explain.floors import Floors, Work, floors, matrix_share, work
from flash_helpers.explain.rejected import Rejected, nearest_rejected
from flash_helpers.explain.resources import Occupancy, Registers, Waves, occupancy, predict_registers
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.problem import Problem


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel.

    Attributes:
        registers: of a thread.
        spill_bytes: stores and loads to local memory, bytes a thread.
        main_loop: instructions of the main loop by class; empty: no disassembler.
        note: why something is missing.
    """

    registers: int
    spill_bytes: int
    main_loop: dict[str, int]
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """Everything that ``flash-attention explain`` shows. Times in milliseconds.

    Attributes:
        kernel: the configuration and the traits that the problem needs.
        problem, device: what it is explained for.
        infeasible: why the device can't run it, or None.
        registers: the prediction.
        compiled: what the compiler says, None when it was not asked.
        smem_bytes: shared memory of a block.
        occupancy: by the compiled registers when there are any, else by the predicted ones.
        waves, work, floors, accesses, rejected: see their classes.
    """

    kernel: ForwardKernel
    problem: Problem
    device: DeviceFacts
    infeasible: str | None
    registers: Registers
    compiled: Compiled | None
    smem_bytes: int
    occupancy: Occupancy
    waves: Waves
    work: Work
    floors: Floors
    accesses: tuple[SharedAccess, ...]
    rejected: tuple[Rejected, ...]

    @property
    def attainable_tflops(self) -> float:
        """FLOP of the problem over its longest floor, 10^12 a second."""
        return self.work.flop / self.floors.longest / 1e9

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kernel": self.kernel.short_form(),
            "problem": self.problem.to_json(),
            "device": asdict(self.device),
            "infeasible": self.infeasible,
            "registers": asdict(self.registers),
            "compiled": asdict(self.compiled) if self.compiled else None,
            "smem_bytes": self.smem_bytes,
            "occupancy": self.occupancy.to_json(),
            "waves": asdict(self.waves),
            "work": asdict(self.work),
            "floors_ms": asdict(self.floors),
            "attainable_tflops": self.attainable_tflops,
            "shared_accesses": [{**asdict(a), "ways": a.ways} for a in self.accesses],
            "rejected": [
                {"kernel": r.config.short_form(), "change": r.change, "reason": r.reason}
                for r in self.rejected
            ],
        }


def explain(
    config: ForwardConfig,
    problem: Problem,
    facts: DeviceFacts,
    compiled: Compiled | None = None,
) -> Explanation:
    """Explains a configuration; needs neither a GPU nor, without ``compiled``, a compiler.

    Args:
        config: the configuration.
        problem: sizes; dtype and head size must be the configuration's.
        facts: the device, e.g. ``device_facts("H100")``.
        compiled: from ``compile_facts``.

    Raises:
        ValueError: the configuration is for another dtype or head size, or is malformed.
    """
    if (config.dtype, config.d_head) != (problem.dtype, problem.d_head):
        raise ValueError(
            f"{config.short_form()} is for {config.dtype.name} and d_head {config.d_head}; the problem has "
            f"{problem.dtype.name} and d_head {problem.d_head}"
        )
    if malformed := config.malformed_reason():
        raise ValueError(f"{config.short_form()} can't be built: {malformed}")
    registers = predict_registers(config)
    used = compiled.registers if compiled else registers.total
    resident = occupancy(config.n_warps, used, config.smem_bytes(), facts)
    thread_blocks = problem.batch * problem.heads * -(-problem.seq_len // config.B_r)
    done = work(config, problem)
    return Explanation(
        kernel=ForwardKernel(config, ForwardTraits(causal=problem.causal)),
        problem=problem,
        device=facts,
        infeasible=config.infeasible_reason(facts),
        registers=registers,
        compiled=compiled,
        smem_bytes=config.smem_bytes(),
        occupancy=resident,
        waves=Waves.of(thread_blocks, resident.blocks, facts.sm_count),
        work=done,
        floors=floors(done, facts, matrix_share(config, facts)),
        accesses=tuple(shared_accesses(config)),
        rejected=tuple(nearest_rejected(config, facts)),
    )


def compile_facts(kernel: ForwardKernel, target: int) -> Compiled:
    """Compiles one kernel (or finds it in the cache) and reads what came out.

    Raises:
        flash_helpers.build.BuildError: no compiler, or it refuses the kernel.
    """
    from flash_helpers.build import build_library
    from flash_helpers.build.sass import (
        DisassemblerNotFoundError,
        count_classes,
        disassemble,
        hot_path,
        main_loop,
        parse_functions,
    )

    result = build_library([kernel], target, jobs=1)
    (facts,) = result.kernels
    try:
        functions = parse_functions(disassemble(result.path))
    except (DisassemblerNotFoundError, ValueError) as error:
        return Compiled(facts.registers, facts.spill_bytes, {}, str(error))
    # A kernel may hold a slower copy of itself for rare cases, with smaller steps.
    n_products = getattr(kernel.config, "products_per_block", None)
    loops = (hot_path(main_loop(body, n_products)) for body in functions.values())
    loop = max(loops, key=len, default=[])
    return Compiled(facts.registers, facts.spill_bytes, count_classes(loop) if loop else {})
