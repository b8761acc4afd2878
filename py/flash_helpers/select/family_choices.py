"""What each family's table of defaults says of one problem on one device."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.defaults import Defaults
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import kernel_for, split_variant, unable_reason
from flash_helpers.select.prediction import parts_of_keys


@dataclass(frozen=True)
class FamilyChoice:
    """A family's choice for a problem.

    Attributes:
        kernel: the kernel.
        n_splits: parts that the keys are cut into.
        reason: the table's.
        obstacle: why it cannot run, or None.
    """

    kernel: Kernel
    n_splits: int
    reason: str
    obstacle: str | None


def family_choices(problem: AttentionProblem, facts: DeviceFacts) -> list[FamilyChoice]:
    """The choices of each family that runs on the device, the one that is expected to be faster first.

    Of one family, the choice for keys in parts comes first where it makes more than one part. For few queries
    over many keys its configuration is also the better one for whole rows.

    Args:
        problem: the problem as the kernel is given it.
        facts: the device.
    """
    answers = [direction.defaults(problem, facts) for direction in directions(problem.direction)]
    found = sorted((answer for answer in answers if answer is not None), key=lambda answer: answer.place)
    if problem.invariant:  # families round differently: one answers for all problems of a device
        found = found[:1]
    return [c for answer in found for c in _split_and_whole(problem, facts, answer)]


def _split_and_whole(
    problem: AttentionProblem,
    facts: DeviceFacts,
    answer: Defaults,
) -> list[FamilyChoice]:
    """The choices of a family, the one for keys in parts only where there is more than one part."""
    found = []
    split, whole = answer.split, answer.whole
    config, reason = split
    variant = split_variant(kernel_for(config, problem))
    if answer.in_parts and variant is not None and not _obstacle(config, problem, facts):
        parts = parts_of_keys(variant, problem, facts)
        if parts > 1:
            found.append(FamilyChoice(variant, parts, reason, None))
    if problem.out_float32:  # kernels that split keys write it, also in one part
        whole = split
    for config, reason in (split, whole) if problem.decoding else (whole,):
        obstacle = _obstacle(config, problem, facts)
        found.append(FamilyChoice(kernel_for(config, problem), 1, reason, obstacle))
    return found


def _obstacle(config: KernelConfig, problem: AttentionProblem, facts: DeviceFacts) -> str | None:
    return unable_reason(config, problem, [config]) or config.infeasible_reason(facts)
