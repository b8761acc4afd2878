"""The backward pass of the Ampere family as the rest of the library asks for it."""

from __future__ import annotations

from flash_helpers.kernels.ampere.backward.config import NAME, FlashBackwardKernelConfig
from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.direction import ALL_BACKWARD_TRAITS, Direction
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.problem import BACKWARD

D_HEADS = (64, 128, 256)


def _configs() -> list[FlashBackwardKernelConfig]:
    return [FlashBackwardKernelConfig(t, d, d, 64, 64, 4) for t in DType for d in D_HEADS]


DIRECTION = Direction(
    family=AMPERE,
    name=BACKWARD,
    kernel=BackwardKernel,
    names=NAME,
    launcher_header="ampere/backward/launcher.cuh",
    make_record="flash::ampere::make_backward_record",
    traits=ALL_BACKWARD_TRAITS,
    built=lambda: [BackwardKernel(config) for config in _configs()],
    candidates=_configs,
)
