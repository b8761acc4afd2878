"""The forward pass of the Hopper family as the rest of the library asks for it."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.direction import ALL_TRAITS, Direction, Ladder
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.hopper.forward.config import NAME, HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.defaults import defaults, sizes
from flash_helpers.kernels.hopper.forward.gates import counts, violations
from flash_helpers.kernels.hopper.forward.ladder import (
    STEPS,
    get_hopper_ladder,
    get_hopper_progression_configs,
)
from flash_helpers.kernels.hopper.forward.model import HopperForwardModel
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.hopper.forward.resources import PANEL_COLUMNS, REGISTERS, WARPGROUP_ROWS
from flash_helpers.kernels.hopper.forward.rules import MMA_K, PRODUCT_WIDTHS
from flash_helpers.kernels.hopper.forward.sets import get_hopper_best_kernels, get_hopper_kernels_to_build
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.softmax import SoftmaxReference

NEIGHBOURS: dict[str, tuple[int | bool, ...]] = {
    "B_r": tuple(WARPGROUP_ROWS * n for n in REGISTERS),
    "B_c": PRODUCT_WIDTHS,
    "kv_stages": tuple(range(1, 9)),
    "extra_k_stages": (0, 1, 2),
    "q_stages": tuple(range(1, 5)),
    "overlap_products": (False, True),
    "ping_pong": (False, True),
    "softmax_reference": tuple(SoftmaxReference),
    "forced_overlap": (False, True),
    "next_item": tuple(NextItem),
    "direct_store": (False, True),
}
"""What never makes a kernel impossible is left out."""

LEAST_COLUMNS = 48  # of a tile: with fewer a step is mostly latency


def _candidates() -> list[ForwardConfig]:
    return sorted({kernel.config for kernel in get_hopper_best_kernels()})


def _built_configs() -> list[ForwardConfig]:
    return sorted({kernel.config for kernel in get_hopper_kernels_to_build()})


def _reads_beyond(kernel: ForwardKernel, wanted: tuple[int, int]) -> bool:
    """Ragged copies (tensor_view.cuh) must not ask for columns of which the tensors have none."""
    if not kernel.traits.varlen:
        return True
    own = (kernel.config.d_head, kernel.config.d_head_v)
    panels = [tuple(-(-d // PANEL_COLUMNS) for d in sizes) for sizes in (wanted, own)]
    return panels[0] == panels[1]


def _unable_reason(config: HopperForwardKernelConfig, problem: AttentionProblem) -> str | None:
    if problem.tma_obstacle:
        return f"its bulk copies (TMA) cannot reach the tensors: {problem.tma_obstacle}"
    unpaired = problem.varlen or problem.out_float32 or (problem.masked and not problem.causal)
    if problem.n_sms == 1 and config.paired_blocks and not unpaired:
        return "n_sms is 1, and its paired_blocks take two SMs at a time"
    return None


def _relieved(config: HopperForwardKernelConfig) -> HopperForwardKernelConfig | None:
    """With narrower tiles; then with one product at a time, so that nothing is in flight beside a mod."""
    narrower = [width for width in PRODUCT_WIDTHS if width <= config.B_c * 3 // 4 and width % MMA_K == 0]
    if narrower and narrower[-1] >= LEAST_COLUMNS:
        return replace(config, B_c=narrower[-1], half_tiles=False)
    if config.overlap_products:
        return replace(
            config,
            overlap_products=False,
            forced_overlap=False,
            early_pass=False,
            half_tiles=False,
            next_item=NextItem.NONE,
        )
    return None


DIRECTION = Direction(
    family=HOPPER,
    names=NAME,
    launcher_header="hopper/forward/launcher.cuh",
    make_record="flash::hopper::make_record",
    traits=ALL_TRAITS,
    model=HopperForwardModel(),
    built=get_hopper_kernels_to_build,
    candidates=_candidates,
    tuned=_built_configs,
    sets={"hopper_ladder": get_hopper_progression_configs},
    checked=lambda target: get_hopper_kernels_to_build() if HOPPER.runs_on(target) else [],
    violations=violations,
    counts=counts,
    defaults=defaults,
    sizes=sizes,
    reads_beyond=_reads_beyond,
    unable_reason=_unable_reason,
    mod_obstacle=lambda _: None,
    relieved=_relieved,
    neighbours=NEIGHBOURS,
    ladder=Ladder(STEPS, get_hopper_ladder),
)
