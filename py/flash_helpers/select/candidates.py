"""Which configurations can compute a problem, compiled for which features; and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flash_helpers.kernels.families import direction_of, directions, kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.problem import FORWARD, AttentionProblem


def default_candidates(direction: str = FORWARD) -> list[KernelConfig]:
    """The configurations that a direction of every family offers."""
    return [config for each in directions(direction) for config in each.candidates()]


def kernel_for(config: KernelConfig, problem: AttentionProblem) -> Kernel:
    """The configuration compiled for the features of the problem and its mod, whether or not its family has
    them.

    Tensors with smaller heads are taken as they are by kernels that can, and else padded before the call. A
    float32 output is written by kernels that split keys.
    """
    # What parts of split keys leave is float32: one part is the whole, unrounded.
    split = {"split": True} if problem.out_float32 and not problem.planned else {}
    kernel = kernel_of(config, **problem.features(), **split)
    if problem.has_mod:
        kernel = replace(kernel, mod=problem.compiled_mod)
    wanted = (problem.d_head, problem.d_head_v)
    if wanted != head_sizes(config) and holds(config, wanted) and _pads(kernel, wanted):
        kernel = replace(kernel, traits=replace(kernel.traits, padded_head=True))
    return kernel


def _pads(kernel: Kernel, wanted: tuple[int, int]) -> bool:
    """Whether the kernel reads zeros beyond the columns of the tensors."""
    direction = direction_of(kernel)
    return "padded_head" in direction.traits and direction.reads_beyond(kernel, wanted)


def is_split(kernel: Kernel) -> bool:
    """Whether a kernel shares the keys of a query block among thread blocks; no backward kernel does."""
    return bool(getattr(kernel.traits, "split", False))


def is_planned(kernel: Kernel) -> bool:
    """Whether a kernel finds its work, and the parts of the keys, on the device; no backward kernel does."""
    return bool(getattr(kernel.traits, "planned", False))


def split_variant(kernel: Kernel) -> Kernel | None:
    """The same kernel with its keys cut into parts, or None where that cannot be compiled."""
    if "split" not in direction_of(kernel).traits or not kernel.config.writes_lse:  # parts are added by it
        return None
    split = replace(kernel, traits=replace(kernel.traits, split=True))
    return None if split.malformed_reason() else split


PLANNED = "packed queries over a cache, with counts of rows or with a number of parts"  # ``problem.planned``


def unable_reason(config: Any, problem: AttentionProblem, configs: Sequence[KernelConfig]) -> str | None:
    """Why a configuration cannot compute a problem on any GPU, or None.

    Args:
        config: the candidate.
        problem: the problem.
        configs: all candidates.
    """
    if reason := size_reason(config, problem, configs):
        return reason
    direction = direction_of(config)
    if direction.name != problem.direction:
        return f"it computes {direction.name}, and {problem.direction} is wanted"
    if problem.has_mod and (reason := direction.mod_obstacle(config)):
        return reason
    if problem.mod is not None and problem.planned:
        return f"kernels take no score_mod and no mask_mod for {PLANNED}; CPU tensors do"
    if problem.dropout and problem.planned:
        return f"kernels drop no weights (dropout_p) for {PLANNED}; CPU tensors do"
    if problem.invariant and (reason := row_obstacle(numeric_class_of(config), problem)):
        return reason
    kernel = kernel_for(config, problem)
    if missing := direction.missing_traits(kernel.traits):
        return f"kernels of the {direction.label} family are not made for {', '.join(missing)}"
    if reason := direction.unable_reason(config, problem):
        return reason
    if reason := kernel.malformed_reason():
        return reason
    if problem.deterministic and not config.deterministic:
        return "it adds the sums of dQ in any order, and equal bits in every run are wanted"
    if problem.lse and not config.writes_lse:
        return "it sums the rounded P, which is not exact enough for the LSE that is wanted"
    if problem.dropout and problem.direction == FORWARD and not config.writes_lse:
        return "it sums P as the second product takes it, and weights that are dropped count in the sum"
    return None


def row_obstacle(numeric_class: NumericClass, problem: AttentionProblem) -> str | None:
    """Why the bits of a row depend on the rows beside it, or None."""
    if reason := numeric_class.row_obstacle:
        return reason
    return numeric_class.softcap_obstacle() if problem.softcap else None


def numeric_class_of(config: Any) -> NumericClass:
    """The numeric class of a configuration of a forward kernel."""
    numeric_class: NumericClass = config.numeric_class
    return numeric_class


def class_reason(own: NumericClass, wanted: NumericClass) -> str | None:
    """Why a configuration of one numeric class does not compute with the bits of another, or None."""
    if own == wanted:
        return None
    return f"its numeric class is not that of numerics='invariant' here: {own.difference(wanted)}"


def size_reason(
    config: KernelConfig, problem: AttentionProblem, configs: Sequence[KernelConfig]
) -> str | None:
    """Why element type or head sizes rule a configuration out, or None.

    Tensors whose head size is between those of the candidates are padded with zeros to the next one.
    """
    if config.dtype is not problem.dtype:
        return f"it computes in {config.dtype.name}, the tensors are {problem.dtype.name}"
    wanted = (problem.d_head, problem.d_head_v)
    if not holds(config, wanted):
        return f"its head size is {_sizes_text(head_sizes(config))}, the tensors' is {_sizes_text(wanted)}"
    for other in configs:
        if type(other) is type(config) and holds(other, wanted) and head_sizes(other) < head_sizes(config):
            return (
                f"its head size is {_sizes_text(head_sizes(config))}; a smaller one, "
                f"{_sizes_text(head_sizes(other))}, holds the tensors' {_sizes_text(wanted)}"
            )
    return None


def head_sizes(config: KernelConfig) -> tuple[int, int]:
    """Columns of Q and K, and of V and O."""
    return config.d_head, config.d_head_v


def holds(config: KernelConfig, wanted: tuple[int, int]) -> bool:
    """Whether tensors with these head sizes fit, padded or not."""
    return all(has >= needs for has, needs in zip(head_sizes(config), wanted, strict=True))


def _sizes_text(sizes: tuple[int, int]) -> str:
    return str(sizes[0]) if sizes[0] == sizes[1] else f"{sizes[0]}/{sizes[1]}"
