"""The backward pass of the Ampere family as the rest of the library asks for it."""

from __future__ import annotations

from flash_helpers.kernels.ampere.backward.choices import get_ampere_best_backward_kernels
from flash_helpers.kernels.ampere.backward.config import NAME, DQSum, DQWarps
from flash_helpers.kernels.ampere.backward.defaults import defaults, sizes
from flash_helpers.kernels.ampere.backward.gates import violations
from flash_helpers.kernels.ampere.backward.ladder import STEPS, get_ampere_backward_ladder
from flash_helpers.kernels.ampere.backward.model import AmpereBackwardModel
from flash_helpers.kernels.ampere.backward.sets import (
    get_backward_kernels_to_build,
    get_backward_tuning_configs,
    untuned_reason,
)
from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.direction import ALL_BACKWARD_TRAITS, Direction, Ladder
from flash_helpers.kernels.kernel import BackwardKernel, Kernel
from flash_helpers.kernels.problem import BACKWARD

NEIGHBOURS: dict[str, tuple[int | bool, ...]] = {
    "B_r": (64, 128),
    "B_c": (16, 32, 64, 128, 256),
    "n_warps": (4, 8, 12, 16),
    "stages": (1, 2, 3),
    "ds_slots": (1, 2),
    "paired_warps": (False, True),
    "holds_K": (False, True),
    "holds_V": (False, True),
    "dq_warps": tuple(DQWarps),
    "dq_sum": (DQSum.ATOMIC, DQSum.ORDERED),
    "dq_B_r": (64, 128, 256),
    "dq_B_c": (16, 32, 48, 64),
}


def _checked(target: int) -> list[Kernel]:
    return [*get_ampere_best_backward_kernels(capability=divmod(target, 10))]


DIRECTION = Direction(
    family=AMPERE,
    name=BACKWARD,
    kernel=BackwardKernel,
    names=NAME,
    launcher_header="ampere/backward/launcher.cuh",
    make_record="flash::ampere::make_backward_record",
    traits=ALL_BACKWARD_TRAITS,
    model=AmpereBackwardModel(),
    built=lambda: [BackwardKernel(config) for config in get_backward_kernels_to_build()],
    candidates=get_backward_kernels_to_build,
    tuned=get_backward_tuning_configs,
    checked=_checked,
    violations=violations,
    mod_obstacle=lambda _: None,
    defaults=defaults,
    sizes=sizes,
    neighbours=NEIGHBOURS,
    untuned_reason=untuned_reason,
    ladder=Ladder(STEPS, get_ampere_backward_ladder),
)
