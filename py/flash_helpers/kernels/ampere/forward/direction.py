"""The forward pass of the Ampere family as the rest of the library asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.ampere.forward.choices import get_ampere_best_kernels
from flash_helpers.kernels.ampere.forward.config import MMA_M, NAME, FlashForwardKernelConfig
from flash_helpers.kernels.ampere.forward.defaults import defaults, sizes
from flash_helpers.kernels.ampere.forward.ladder import STEPS, get_ampere_ladder
from flash_helpers.kernels.ampere.forward.model import AmpereForwardModel
from flash_helpers.kernels.ampere.forward.sets import (
    get_autotuning_kernel_configs,
    get_kernels_to_build,
    skip_autotune_reason,
)
from flash_helpers.kernels.direction import ALL_TRAITS, Direction, Ladder
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.softmax import SoftmaxReference

MOST_WARPS = 8  # of a block; twice as many would halve the registers of a thread

NEIGHBOURS: dict[str, tuple[int | bool, ...]] = {
    "B_r": (32, 64, 128, 256),
    "B_c": (16, 32, 64, 128, 256),
    "n_warps": (2, 4, 8, 16),
    "async_copy": (False, True),
    "eager_load_blocks": (False, True),
    "Q_mma_load_K_tiles": (0, 2),
    "K_mma_load_K_tiles": (0, 2),
    "V_mma_load_K_tiles": (0, 2),
    "mma_double_buffer_loads": (False, True),
    "kv_stages": tuple(range(1, 9)),
    "mbarrier": (False, True),
    "softmax_reference": tuple(SoftmaxReference),
    "fragments_ahead": (0, 1, 2),
    "paired_warps": (False, True),
}


def _checked(target: int) -> list[ForwardKernel]:
    chosen = get_ampere_best_kernels(capability=divmod(target, 10))
    return [*map(ForwardKernel, get_kernels_to_build()), *chosen]


def _variant(config: FlashForwardKernelConfig) -> str:
    words = ["eager" if config.eager_load_blocks else "not eager"]
    words.append("Q held" if config.Q_mma_load_K_tiles == 0 else "Q streamed")
    return ", ".join([*words, *(["buffer"] if config.mma_double_buffer_loads else [])])


def _unable_reason(_: FlashForwardKernelConfig, problem: AttentionProblem) -> str | None:
    if problem.n_sms is not None:
        return (
            f"its grids are not persistent, so that no launch keeps to n_sms={problem.n_sms}; kernels of the "
            "Hopper family do"
        )
    return None


def _mod_obstacle(config: FlashForwardKernelConfig) -> str | None:
    if config.softmax_reference in (SoftmaxReference.LAGGED, SoftmaxReference.ANCHORED):
        return (
            f"its softmax_reference {config.softmax_reference.name} counts on blocks that show each query a "
            "key, and a mod may hide any"
        )
    if config.chunk_tiles:
        return f"its keys are cut into chunks of {config.chunk_tiles} tiles, which are made for no mod"
    return None


def _relieved(config: FlashForwardKernelConfig) -> FlashForwardKernelConfig | None:
    """With half the rows a warp, then with fewer keys a block."""
    changes: list[dict[str, Any]] = []
    if config.rows_per_warp > MMA_M and not config.paired_warps:
        fewer: dict[str, Any] = (
            {"B_r": config.B_r // 2} if config.n_warps >= MOST_WARPS else {"n_warps": 2 * config.n_warps}
        )
        changes += [fewer, {**fewer, "B_c": 64}]
    changes.append({"B_c": config.B_c // 2})
    for change in changes:
        relieved = replace(config, **change)
        if relieved.malformed_reason() is None:
            return relieved
    return None


DIRECTION = Direction(
    family=AMPERE,
    names=NAME,
    launcher_header="ampere/forward/launcher.cuh",
    make_record="flash::ampere::make_record",
    traits=ALL_TRAITS,
    model=AmpereForwardModel(),
    built=lambda: [ForwardKernel(config) for config in get_kernels_to_build()],
    candidates=get_kernels_to_build,
    tuned=get_autotuning_kernel_configs,
    checked=_checked,
    defaults=defaults,
    sizes=sizes,
    unable_reason=_unable_reason,
    mod_obstacle=_mod_obstacle,
    relieved=_relieved,
    neighbours=NEIGHBOURS,
    untuned_reason=skip_autotune_reason,
    variant=_variant,
    ladder=Ladder(STEPS, get_ampere_ladder),
)
