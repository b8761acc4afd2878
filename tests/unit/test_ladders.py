"""The ladders: one idea a step, up to a kernel that is chosen, and every step runs on an H100."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from flash_helpers.kernel_configs import (
    DType,
    choose_ampere_kernel,
    choose_hopper_kernel,
    device_facts,
    get_kernel_progression_configs,
)
from flash_helpers.kernels.ampere.backward.defaults import defaults as ampere_backward_defaults
from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.hopper.backward.choices import choose_hopper_backward_kernel
from flash_helpers.kernels.ladders import LADDERS, get_ladder
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits


def choose_ampere_backward(dtype: DType, d_head: int, causal: bool, seq_len: int) -> tuple[Any, str]:
    """The default of a call's gradients."""
    call = AttentionProblem(
        dtype, 1, seq_len, seq_len, 8, 8, d_head, d_head, right=0 if causal else None
    ).backward()
    found = ampere_backward_defaults(call, device_facts("H100"))
    assert found is not None
    config, reason = found.whole
    return kernel_of(config, causal=causal), reason


def choose_hopper_backward(dtype: DType, d_head: int, causal: bool, seq_len: int) -> tuple[Any, str]:
    """The default of a call's gradients."""
    return choose_hopper_backward_kernel(dtype, (d_head, d_head), seq_len, BackwardTraits(causal=causal))


CHOOSE = {
    "ampere": choose_ampere_kernel,
    "hopper": choose_hopper_kernel,
    "ampere_backward": choose_ampere_backward,
    "hopper_backward": choose_hopper_backward,
}
ALL = [(f, d, causal) for f, d_heads in LADDERS.items() for d in d_heads for causal in (False, True)]


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize(("family", "d_head", "causal"), ALL)
def test_each_step_changes_what_it_says_and_runs(
    family: str, d_head: int, causal: bool, dtype: DType
) -> None:
    ladder = get_ladder(family, dtype, d_head, causal)
    for before, after in pairwise(ladder):
        changed = {
            f.name
            for f in fields(before.config)
            if getattr(before.config, f.name) != getattr(after.config, f.name)
        }
        assert changed == set(after.step.changes), after.step.idea
    assert len({rung.config for rung in ladder}) == len({rung.step.idea for rung in ladder}) == len(ladder)
    for rung in ladder:
        assert rung.config.infeasible_reason(device_facts("H100")) is None, rung.step.idea


@pytest.mark.parametrize(("family", "d_head", "causal"), ALL)
def test_ladders_lead_to_chosen_kernels(family: str, d_head: int, causal: bool) -> None:
    chosen = {CHOOSE[family](DType.BF16, d_head, causal, s)[0].config for s in (512, 2048, 4096, 16384)}
    assert get_ladder(family, DType.BF16, d_head, causal)[-1].config in chosen


def test_the_ampere_ladder_begins_with_the_seven_steps() -> None:
    ladder = get_ladder("ampere", DType.FP16, 128, False)
    assert [rung.config for rung in ladder[:7]] == get_kernel_progression_configs()


def test_unknown_ladders_are_named() -> None:
    with pytest.raises(ValueError, match="'volta'; valid: ampere, hopper"):
        get_ladder("volta", DType.BF16, 128, False)
    for family in LADDERS:
        with pytest.raises(ValueError, match="head size 80; there are ladders for 64, 128, 256"):
            get_ladder(family, DType.BF16, 80, False)
