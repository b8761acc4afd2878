"""The model's time of Q that no slot can ask for early, against what was measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.kernel_configs import KNOWN_DEVICES, DType
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.prediction import predict

TWO_SLOTS = "(BF16, 64, 192, 80, 3wg): tma+kv_2+q_2+overlap+ping_pong+lagged+next_with_pv+sections"


def config(**changes: object) -> HopperForwardKernelConfig:
    found = parse_kernel_name_into_config(TWO_SLOTS)
    assert isinstance(found, HopperForwardKernelConfig)
    return replace(found, **changes)  # type: ignore[arg-type]


def microseconds(config: HopperForwardKernelConfig, keys: int) -> float:
    problem = AttentionProblem(DType.BF16, 8, 4096, keys, 16, 16, 64, 64)
    return 1e6 * predict(ForwardKernel(config), problem, KNOWN_DEVICES["H200"]).seconds


@pytest.mark.parametrize(
    ("q_stages", "direct_store", "measured"),
    [(2, False, 84.5), (2, True, 46.6), (4, False, 44.0), (4, True, 43.4)],
)
def test_items_of_one_tile(q_stages, direct_store, measured):
    found = config(q_stages=q_stages, direct_store=direct_store)
    assert microseconds(found, 16) == pytest.approx(measured, rel=0.25)


def test_a_third_slot_hides_it_and_so_do_many_tiles():
    two, three = config(), config(q_stages=3)
    assert microseconds(two, 16) > 1.5 * microseconds(three, 16)
    assert microseconds(two, 4096) == microseconds(three, 4096)
    alone = replace(two, next_item=NextItem.NONE)
    assert microseconds(alone, 16) == microseconds(replace(alone, q_stages=3), 16)
