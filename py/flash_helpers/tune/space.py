"""Which configurations are worth compiling for a problem: what the resource model leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of, directions, kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import BACKWARD, FORWARD
from flash_helpers.problem import Problem
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.prediction import predict

# A candidate that the model expects to take this much longer than the best is left out. The model's worst
# error over the committed result files is below 1.7 times, its median error 5 %.
PRUNE_FACTOR = 2.0


@dataclass(frozen=True)
class Pruned:
    """A kernel that is not measured, and why."""

    kernel: Kernel
    reason: str


def tuning_space() -> list[KernelConfig]:
    """All candidates of all families."""
    return [config for name in (FORWARD, BACKWARD) for each in directions(name) for config in each.tuned()]


def predicted_ms(config: KernelConfig, problem: Problem, facts: DeviceFacts) -> float | None:
    """The time that the model expects, milliseconds.

    None where no block fits an SM, where the device's rates are not known, or without a model.
    """
    rates = facts.mma_flops and facts.dram_bandwidth and facts.clock_hz
    if not rates or direction_of(config).model is None:
        return None
    kernel = kernel_of(config, causal=problem.causal)
    prediction = predict(kernel, attention_problem(problem), facts)
    return 1e3 * prediction.seconds if prediction.blocks_per_sm else None


def prune(
    configs: Iterable[KernelConfig], problem: Problem, facts: DeviceFacts
) -> tuple[list[Kernel], list[Pruned]]:
    """The kernels to measure, the most promising first, and those left out.

    Args:
        configs: those that are made for another dtype or head size are no candidates.
        problem: the sizes.
        facts: the device.
    """
    kept: list[tuple[float, Kernel]] = []
    pruned: list[Pruned] = []
    for config in configs:
        if not problem.fits(config):
            continue
        kernel = kernel_of(config, causal=problem.causal)
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
