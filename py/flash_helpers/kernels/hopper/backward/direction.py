"""The backward pass of the Hopper family as the rest of the library asks for it."""

from __future__ import annotations

from flash_helpers.kernels.direction import ALL_BACKWARD_TRAITS, Direction, Ladder
from flash_helpers.kernels.hopper.backward.config import NAME, HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.defaults import defaults, sizes
from flash_helpers.kernels.hopper.backward.gates import violations
from flash_helpers.kernels.hopper.backward.ladder import STEPS, get_hopper_backward_ladder
from flash_helpers.kernels.hopper.backward.model import HopperBackwardModel
from flash_helpers.kernels.hopper.backward.resources import PANEL_COLUMNS, DqOutput
from flash_helpers.kernels.hopper.backward.rules import DQ_KEYS
from flash_helpers.kernels.hopper.backward.sets import (
    get_hopper_backward_configs,
    get_hopper_backward_kernels,
    get_hopper_backward_tuning_configs,
)
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem

NEIGHBOURS: dict[str, tuple[int | bool, ...]] = {
    "B_r": (64, 128),
    "B_c": (64, 128),
    "q_stages": (2, 3, 4),
    "k_stages": (1, 2),
    "v_stages": (1, 2),
    "dq_output": tuple(DqOutput),
    "late_dq": (False, True),
    "ping_pong": (False, True),
    "lse_ahead": (False, True),
    "float_p": (False, True),
    "split_gradients": (False, True),
    "dq_B_c": (0, *DQ_KEYS),
}
"""What never makes a kernel impossible is left out."""


def _reads_beyond(kernel: BackwardKernel, wanted: tuple[int, int]) -> bool:
    """Copies must not ask for columns of which the tensors have none."""
    own = (kernel.config.d_head, kernel.config.d_head_v)
    panels = [tuple(-(-d // PANEL_COLUMNS) for d in sizes) for sizes in (wanted, own)]
    return panels[0] == panels[1]


def _unable_reason(config: HopperBackwardKernelConfig, problem: AttentionProblem) -> str | None:
    if problem.tma_obstacle:
        return f"its bulk copies (TMA) cannot reach the tensors: {problem.tma_obstacle}"
    return None


DIRECTION = Direction(
    family=HOPPER,
    name=BACKWARD,
    kernel=BackwardKernel,
    names=NAME,
    launcher_header="hopper/backward/launcher.cuh",
    make_record="flash::hopper::make_backward_record",
    traits=ALL_BACKWARD_TRAITS,
    model=HopperBackwardModel(),
    built=get_hopper_backward_kernels,
    candidates=get_hopper_backward_configs,
    tuned=get_hopper_backward_tuning_configs,
    checked=lambda target: get_hopper_backward_kernels() if HOPPER.runs_on(target) else [],
    violations=violations,
    defaults=defaults,
    sizes=sizes,
    reads_beyond=_reads_beyond,
    unable_reason=_unable_reason,
    mod_obstacle=lambda _: None,
    neighbours=NEIGHBOURS,
    ladder=Ladder(STEPS, get_hopper_backward_ladder),
)
