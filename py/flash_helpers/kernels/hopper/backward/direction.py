"""The backward pass of the Hopper family as the rest of the library asks for it."""

from __future__ import annotations

from flash_helpers.kernels.direction import ALL_BACKWARD_TRAITS, Direction
from flash_helpers.kernels.hopper.backward.config import NAME
from flash_helpers.kernels.hopper.backward.sets import (
    get_hopper_backward_configs,
    get_hopper_backward_kernels,
)
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.problem import BACKWARD

DIRECTION = Direction(
    family=HOPPER,
    name=BACKWARD,
    kernel=BackwardKernel,
    names=NAME,
    launcher_header="hopper/backward/launcher.cuh",
    make_record="flash::hopper::make_backward_record",
    traits=ALL_BACKWARD_TRAITS,
    built=get_hopper_backward_kernels,
    candidates=get_hopper_backward_configs,
)
