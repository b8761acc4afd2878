"""What contract tests run on a GPU, built ahead in parallel, so that few calls compile on first use.

That is what the library chooses for a few hundred queries with the features that tests use; and one
configuration with each set of them, which random calls run in place of what is not built.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from flash_helpers.kernel_configs import (
    DeviceFacts,
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    choose_ampere_kernel,
    choose_hopper_kernel,
)
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.select import select

FEATURES: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("window",),
    ("softcap",),
    ("causal", "softcap"),
    ("sinks",),
    ("causal", "softcap", "sinks"),
)
PACKED: tuple[tuple[str, ...], ...] = ((), ("causal",), ("window",), ("softcap",), ("causal", "sinks"))


def plain_config(dtype: DType, d_head: int) -> FlashForwardKernelConfig:
    """A configuration for small problems that no generation of GPUs chooses."""
    return FlashForwardKernelConfig(dtype, d_head, 64, 64, 4, True, True, True, 0, 2, 2, False, True)


def chosen_kernels(facts: DeviceFacts) -> list[ForwardKernel]:
    """What the library chooses for a few hundred queries with these features, padded or not."""
    results, chosen = TuningResults(), dict[ForwardKernel, None]()
    for dtype, d_head, names, varlen, lse in itertools.product(
        DType, (64, 128, 56), dict.fromkeys(FEATURES + PACKED), (False, True), (False, True)
    ):
        if varlen and (dtype is DType.BF16 or names not in PACKED or d_head not in (64, 128)):
            continue
        problem = AttentionProblem(dtype, 2, 200, 200, 4, 2, d_head, d_head, varlen=varlen, lse=lse)
        on = {name: True for name in names if name in ("softcap", "sinks")}
        limits = {"right": 0} if "causal" in names else {"left": 9, "right": 4} if "window" in names else {}
        chosen[select(replace(problem, **on, **limits), facts, results, explained=False).kernel] = None
    return list(chosen)


def planned_kernels(facts: DeviceFacts) -> list[ForwardKernel]:
    """What it chooses for packed queries over a cache, of either family."""
    results, chosen = TuningResults(), dict[ForwardKernel, None]()
    for names, sinks, paged, obstacle, longest in itertools.product(
        PACKED[:4], (False, True), (False, True), (None, "pages of 5 rows"), (1, 70)
    ):
        if obstacle and not paged:
            continue
        problem = AttentionProblem(
            DType.FP16, 6, longest, 144, 4, 2, 64, 64, softcap="softcap" in names, sinks=sinks, varlen=True,
            cached=True, paged=paged, planned=True, lse=True, tma_obstacle=obstacle,
        )  # fmt: skip
        limits = {"window": {"left": 20, "right": 5}}.get("".join(names), {"right": 0} if names else {})
        problem = replace(problem, **limits).without_idle_limits()
        chosen[select(problem, facts, results, explained=False).kernel] = None
    return list(chosen)


def family_configs(dtype: DType, causal: bool) -> dict[str, ForwardConfig]:
    """What each family chooses for a few hundred queries of head size 64, able to give an LSE."""
    return {
        "ampere": choose_ampere_kernel(dtype, 64, causal, 512, lse=True)[0].config,
        "hopper": choose_hopper_kernel(dtype, 64, causal, 512)[0].config,
    }


def family_kernels(dtype: DType) -> list[ForwardKernel]:
    """These, compiled for what tests of known faults use."""
    return [
        ForwardKernel(config, ForwardTraits(causal=causal, padded_head=padded))
        for causal in (False, True)
        for config in family_configs(dtype, causal).values()
        for padded in (False, True)
    ]


def kernels(facts: DeviceFacts) -> list[ForwardKernel]:
    """All of them that run on a GPU, each once."""
    found = chosen_kernels(facts) + planned_kernels(facts)
    packed = {DType.FP16: PACKED, DType.BF16: ()}
    for dtype, d_head, padded in itertools.product(DType, (64, 128), (False, True)):
        # A causal mask over one query hides nothing: what is left of the last set.
        features = (*FEATURES, ("softcap", "sinks"))
        traits = [ForwardTraits(**dict.fromkeys(names, True)) for names in features]
        traits += [ForwardTraits(varlen=True, **dict.fromkeys(names, True)) for names in packed[dtype]]
        config = plain_config(dtype, d_head)
        found += [ForwardKernel(config, replace(each, padded_head=padded)) for each in traits]
    found += [kernel for dtype in DType for kernel in family_kernels(dtype)]
    return [kernel for kernel in dict.fromkeys(found) if family_of(kernel).runs_on(facts.target)]
