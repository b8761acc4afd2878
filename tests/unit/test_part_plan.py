"""What a planned launch is told: numbers that follow from shapes alone, and a bounded workspace."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flash_attention.mods import trace
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import MAX_SPLITS, AttentionProblem
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.part_plan import FEW_QUERIES, MOST_WAVES, WORKSPACE_BYTES, part_plan
from flash_helpers.select.select import select, with_slots
from flash_helpers.select.splits import workspace_bytes

HEADER = Path(__file__).parents[2] / "src" / "include" / "common" / "part_plan.cuh"
MIXED = AttentionProblem(
    DType.BF16, 64, 2048, 8192, 32, 8, 128, 128, right=0, varlen=True, cached=True, paged=True, planned=True
)


def kernel(problem: AttentionProblem = MIXED, device: str = "H200") -> tuple[Kernel, int]:
    facts = device_facts(device)
    choice = with_slots(select(problem, facts, explained=False), facts)
    return choice.kernel, choice.slots


def test_the_device_has_the_same_numbers() -> None:
    text = HEADER.read_text(encoding="utf-8")
    assert re.findall(r"kMostParts = (\d+);", text) == [str(MAX_SPLITS)]
    assert re.findall(r"kMostWaves = (\d+);", text) == [str(MOST_WAVES)]


@pytest.mark.parametrize("device", ["H200", "H100", "A100", "RTX4090"])
def test_kernels_and_slots(device: str) -> None:
    decoding = replace(MIXED, seq_len_q=1, right=None)
    for problem in (MIXED, decoding):
        found, slots = kernel(problem, device)
        assert found.traits.planned
        assert not found.traits.split
        assert found.malformed_reason() is None
        assert slots % device_facts(device).sm_count == 0
    assert kernel(decoding, device)[0].config.B_r == 64


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 64, 512, 2048, 16384])
def test_hopper_kernels_are_chosen_for_every_head_size(d: int, queries: int) -> None:
    limits = {"right": 0} if queries > 1 else {"right": None}
    few_keys = replace(MIXED, seq_len_q=queries, seq_len_k=512, d_head=d, d_head_v=d, **limits)
    found, _ = kernel(few_keys)
    assert isinstance(found.config, HopperForwardKernelConfig)
    assert found.config.n_consumers <= 2  # more leave no registers to the warp that plans


def test_all_but_the_workspace_follows_from_the_shapes() -> None:
    found, slots = kernel()
    first, second = (part_plan(MIXED, found, slots, total_q) for total_q in (64, 2111))
    assert replace(first, rows=second.rows) == second
    assert first.slots == slots
    assert first.few_queries == FEW_QUERIES


@pytest.mark.parametrize("keys", [1024, 8192, 131072, 1 << 20])
@pytest.mark.parametrize("batch", [1, 64, 1000])
@pytest.mark.parametrize("queries", [1, 8, 2048])
def test_the_workspace_is_bounded(queries: int, batch: int, keys: int) -> None:
    problem = replace(MIXED, seq_len_q=queries, batch=batch, seq_len_k=keys)
    found, slots = kernel(problem)
    plan = part_plan(problem, found, slots, batch * queries)
    assert workspace_bytes(1, plan.rows, 128) <= WORKSPACE_BYTES
    assert plan.rows > 0
    assert plan.longest >= plan.shortest


def test_short_keys_and_a_configuration_of_the_caller_are_not_cut() -> None:
    found, slots = kernel()
    short = part_plan(replace(MIXED, seq_len_k=300), found, slots, 100)
    assert (short.slots, short.rows) == (0, 0)
    assert part_plan(MIXED, found, 0, 100).slots == 0


def test_parts_that_the_caller_wants() -> None:
    found, slots = kernel()
    plan = part_plan(MIXED, found, slots, 100, n_splits=3)
    assert (plan.fixed, plan.rows) == (3, 3 * 100 * 32)
    assert part_plan(MIXED, found, slots, 100, n_splits=1).rows == 0
    tiles = 8192 // found.config.B_c
    assert part_plan(MIXED, found, slots, 100, n_splits=256).fixed == tiles


def test_functions_of_the_users_are_refused_by_name() -> None:
    mod = trace(None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "cpu").mod
    with pytest.raises(NoKernelError, match="no score_mod and no mask_mod for packed") as refused:
        kernel(replace(MIXED, mod=mod))
    assert len(str(refused.value).splitlines()) == 3  # what kernels of other head sizes lack is no news


def test_a_float32_output_goes_through_the_workspace() -> None:
    found, slots = kernel(replace(MIXED, out_float32=True))
    problem = replace(MIXED, out_float32=True, seq_len_k=100)
    assert part_plan(problem, found, slots, 100).rows == 100 * 32
