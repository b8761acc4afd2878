"""Which configurations are worth compiling for a problem: what the resource model leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flash_helpers.explain.floors import floors, matrix_share, work
from flash_helpers.explain.resources import Waves, occupancy, predict_registers
from flash_helpers.kernel_configs import get_autotuning_kernel_configs, get_hopper_kernels_to_build
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.problem import Problem

PRUNE_FACTOR = 2.0  # a candidate that the model expects to take this much longer than the best is left out


@dataclass(frozen=True)
class Pruned:
    """A kernel that is not measured, and why."""

    kernel: ForwardKernel
    reason: str


def tuning_space() -> list[ForwardConfig]:
    """All candidates of all families."""
    hopper = sorted({kernel.config for kernel in get_hopper_kernels_to_build()})
    return [*get_autotuning_kernel_configs(), *hopper]


def predicted_ms(config: ForwardConfig, problem: Problem, facts: DeviceFacts) -> float | None:
    """The longest floor over the share of SMs that have work, milliseconds.

    One resident block is taken to keep an SM busy: a bound from below, not a promise. None where no block
    fits an SM, or where the device's rates are not known.
    """
    resident = occupancy(config.n_warps, predict_registers(config).total, config.smem_bytes(), facts)
    thread_blocks = problem.batch * problem.heads * -(-problem.seq_len // config.B_r)
    if not resident.blocks or not (facts.mma_flops and facts.dram_bandwidth and facts.clock_hz):
        return None
    return (
        floors(work(config, problem), facts, matrix_share(config, facts)).longest
        / Waves.of(thread_blocks, 1, facts.sm_count).utilisation
    )


def prune(
    configs: Iterable[ForwardConfig], problem: Problem, facts: DeviceFacts
) -> tuple[list[ForwardKernel], list[Pruned]]:
    """The kernels to measure, the most promising first, and those left out.

    Args:
        configs: those that are made for another dtype or head size are no candidates.
        problem: the sizes.
        facts: the device.
    """
    traits = ForwardTraits(causal=problem.causal)
    kept: list[tuple[float, ForwardKernel]] = []
    pruned: list[Pruned] = []
    for config in configs:
        if not problem.fits(config):
            continue
        kernel = ForwardKernel(config, traits)
        if reason := config.infeasible_reason(facts):
            pruned.append(Pruned(kernel, reason))
        else:
            kept.append((predicted_ms(config, problem, facts) or 0.0, kernel))
    kept.sort(key=lambda entry: entry[0])
    best = kept[0][0] if kept else 0.0
    for milliseconds, kernel in kept:
        if milliseconds > PRUNE_FACTOR * best > 0:
            ratio = milliseconds / best
            pruned.append(Pruned(kernel, f"the model expects {ratio:.1f} times the time of the best"))
    left_out = {entry.kernel for entry in pruned}
    return [kernel for _, kernel in kept if kernel not in left_out], pruned
