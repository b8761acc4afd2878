"""Hopper backward configurations: names there and back, choices, rules, ladders."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flash_helpers.kernel_configs import DType, HopperBackwardKernelConfig, device_facts
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.hopper.backward import resources
from flash_helpers.kernels.hopper.backward.choices import CHOICES, choose_hopper_backward_kernel
from flash_helpers.kernels.hopper.backward.defaults import defaults, sizes
from flash_helpers.kernels.hopper.backward.ladder import STEPS, get_hopper_backward_ladder
from flash_helpers.kernels.hopper.backward.resources import DqOutput
from flash_helpers.kernels.hopper.backward.sets import (
    get_hopper_backward_kernels,
    get_hopper_backward_tuning_configs,
)
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits
from flash_helpers.select.select import select

CFG = HopperBackwardKernelConfig(
    DType.BF16, 128, 128, 64, 128, 2, 2, 1, DqOutput.BULK_REDUCTION, True, True, True, True, True, True, True
)  # fmt: skip
TWO_KERNELS = replace(CFG, dq_output=DqOutput.OWN_KERNEL, late_dq=False, v_stages=2, dq_B_c=96)
D96 = replace(CFG, d_head=96, d_head_v=96)
SPLIT = replace(
    TWO_KERNELS, d_head=256, d_head_v=256, B_c=64, k_stages=1, v_stages=1, ping_pong=False, dq_B_c=64,
    split_gradients=True,
)  # fmt: skip
H100, A100 = device_facts("H100"), device_facts("A100")


def test_short_form() -> None:
    assert CFG.short_form() == (
        "(BF16, 128, 64, 128): "
        "backward+tma+q_2+k_2+v_1+bulk+late+ping_pong+lse_ahead+float_p+dynamic+sections+reversed"
    )
    assert SPLIT.short_form().endswith(
        "own_dq+lse_ahead+float_p+dynamic+sections+reversed+split_gradients+dq_keys_64"
    )
    assert replace(SPLIT, d_head=192, d_head_v=128).short_form().startswith("(BF16, 192/128, 64, 64): ")


@pytest.mark.parametrize("kernel", get_hopper_backward_kernels(), ids=BackwardKernel.short_form)
def test_every_chosen_kernel_is_feasible_and_read_back_from_its_name(kernel: BackwardKernel) -> None:
    assert kernel.infeasible_reason(H100) is None
    assert parse_kernel(kernel.short_form()) == kernel
    assert "kernels of the hopper family run on 9.0 only" in (kernel.infeasible_reason(A100) or "")


def test_every_problem_has_a_choice_that_can_compute_it() -> None:
    flags = (False, True)
    for (d, d_v), causal, window, softcap, varlen, deterministic, seq_len in product(
        sizes(), flags, flags, flags, flags, flags, (1, 512, 4096)
    ):
        traits = BackwardTraits(causal=causal, window=window, softcap=softcap, varlen=varlen)
        kernel, reason = choose_hopper_backward_kernel(DType.FP16, (d, d_v), seq_len, traits, deterministic)
        assert kernel.infeasible_reason(H100) is None, kernel.short_form()
        assert kernel.config.deterministic or not deterministic
        assert reason


def test_defaults_take_the_next_head_size_and_say_when_equal_bits_were_wanted() -> None:
    problem = AttentionProblem(DType.BF16, 2, 4096, 4096, 8, 8, 72, 96).backward()
    found = defaults(problem, H100)
    assert found is not None
    assert found.whole[0].d_head == 96
    assert not found.whole[0].deterministic
    repeated = defaults(replace(problem, deterministic=True), H100)
    assert repeated is not None
    assert repeated.whole[0].deterministic
    assert "equal bits are wanted" in repeated.whole[1]
    assert defaults(problem, A100) is None
    assert defaults(replace(problem, d_head=256, d_head_v=320), H100) is None


def test_heads_are_items_where_they_fill_the_gpu_and_their_sums_the_cache() -> None:
    def chosen(batch: int, heads: int, seq_len: int, d_head: int, **more: Any) -> DqOutput:
        kv = more.pop("n_heads_kv", heads)
        problem = AttentionProblem(
            DType.BF16, batch, seq_len, seq_len, heads, kv, d_head, d_head, **more
        ).backward()
        found = defaults(problem, H100)
        assert found is not None
        assert found.whole[0].infeasible_reason(H100) is None
        return found.whole[0].dq_output

    assert H100.sm_count == 132
    for seq_len in (130, 512):
        assert chosen(8, 33, seq_len, 128, right=0) is DqOutput.BLOCK_SUMS
        assert chosen(1, 120, seq_len, 128, right=0, left=100) is DqOutput.BLOCK_SUMS
    own = DqOutput.OWN_KERNEL
    assert chosen(1, 100, 512, 128, right=0) is own  # 32 SMs would be idle
    assert chosen(1, 150, 512, 128, right=0) is own
    assert chosen(8, 132, 512, 128, right=0, n_heads_kv=33) is own  # four heads of each: 138 MB of sums
    assert chosen(8, 33, 512, 128, right=0, varlen=True) is own
    assert chosen(8, 33, 512, 128, right=0, softcap=True) is own
    assert chosen(8, 33, 512, 256, right=0) is own
    for seq_len, right in ((1024, 0), (512, None)):
        assert chosen(8, 33, seq_len, 128, right=right) is not DqOutput.BLOCK_SUMS


def test_gradients_of_a_float32_output_have_a_kernel() -> None:
    problem = AttentionProblem(DType.BF16, 2, 130, 130, 2, 2, 64, 64, right=0, out_float32=True)
    assert isinstance(select(problem.backward(), H100, explained=False).kernel, BackwardKernel)


def test_choices_name_known_head_sizes() -> None:
    with pytest.raises(ValueError, match=r"head sizes 80/80; there are choices for 128/128, 192/128"):
        choose_hopper_backward_kernel(DType.BF16, (80, 80), 512)
    assert all(choice.config.dtype is DType.BF16 for choice in CHOICES)


@pytest.mark.parametrize(
    ("config", "traits", "reason"),
    [
        (replace(CFG, d_head=80), BackwardTraits(), "d_head is 80; this family has 64, 96, 128, 192, 256"),
        (replace(CFG, B_r=96), BackwardTraits(), "B_r is 96; it must be 64 or 128"),
        (replace(CFG, B_c=64), BackwardTraits(), "B_c is 64; each warpgroup owns 64 keys: it must be 128"),
        (replace(SPLIT, B_c=128), BackwardTraits(), "both warpgroups share 64 keys: it must be 64"),
        (replace(CFG, q_stages=1), BackwardTraits(), "q_stages is 1"),
        (replace(CFG, k_stages=3), BackwardTraits(), "k_stages is 3; it must be 1 or 2"),
        (replace(CFG, v_stages=2), BackwardTraits(), "bytes of shared memory; there are 232448"),
        (replace(CFG, B_r=128), BackwardTraits(), "the tiles of a block take"),
        (replace(CFG, d_head=64, d_head_v=64), BackwardTraits(), "B_r of 128 with d_head 64, of 64 with 96"),
        (
            replace(D96, dq_output=DqOutput.BLOCK_SUMS),
            BackwardTraits(),
            "dq_output BLOCK_SUMS: the last sum of dQ leaves by 32 columns, and a warpgroup has 48 of 96",
        ),
        (replace(D96, v_stages=2), BackwardTraits(), "bytes of shared memory; there are 232448"),
        (replace(CFG, k_stages=1), BackwardTraits(), "late_dq: K of the item before is in use"),
        (replace(CFG, dq_B_c=64), BackwardTraits(), "only dq_output OWN_KERNEL has a kernel of dQ"),
        (replace(TWO_KERNELS, late_dq=True), BackwardTraits(), "late_dq: the main kernel computes no dQ"),
        (
            replace(TWO_KERNELS, trimmed=True),
            BackwardTraits(),
            "trimmed: of a block that a warpgroup does not",
        ),
        (replace(TWO_KERNELS, dq_B_c=0), BackwardTraits(), "dq_B_c is 0; the kernel of dQ takes"),
        (replace(SPLIT, d_head_v=64, dq_B_c=80), BackwardTraits(), "dQ, S, dP and dS take 228 registers"),
        (replace(SPLIT, dq_B_c=80), BackwardTraits(), "a block of dQ's kernel takes"),
        (replace(SPLIT, ping_pong=True), BackwardTraits(), "ping_pong is about turns of two"),
        (replace(CFG, split_gradients=True, B_c=64), BackwardTraits(), "no warpgroup has registers for dQ"),
        (replace(CFG, d_head=64, d_head_v=64, B_r=128), BackwardTraits(), "the tiles take 256 registers"),
        (
            replace(CFG, d_head=64, d_head_v=64, B_r=128, float_p=False),
            BackwardTraits(softcap=True),
            "the tiles take 256 registers",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    config: HopperBackwardKernelConfig, traits: BackwardTraits, reason: str
) -> None:
    assert reason in (config.malformed_reason(traits) or "")


def test_registers_known_from_compiling() -> None:
    """What was compiled without a spill is allowed, what ptxas serialised is not."""
    d64 = replace(CFG, d_head=64, d_head_v=64, B_r=128, float_p=False)
    assert d64.malformed_reason() is None
    assert replace(d64, float_p=True).malformed_reason() is not None
    assert d64.malformed_reason(BackwardTraits(softcap=True)) is not None
    assert CFG.malformed_reason(BackwardTraits(softcap=True)) is None
    assert all(D96.malformed_reason(BackwardTraits(softcap=capped)) is None for capped in (False, True))
    own = replace(d64, dq_output=DqOutput.OWN_KERNEL, late_dq=False, dq_B_c=128)
    assert own.malformed_reason() is None
    assert own.malformed_reason(BackwardTraits(softcap=True)) is not None
    assert replace(own, B_r=64, float_p=True).malformed_reason(BackwardTraits(softcap=True)) is None
    rows_of_96 = replace(own, d_head=96, d_head_v=96, v_stages=1, dq_B_c=96)
    assert "the tiles take 224 registers a thread; there are 208" in (rows_of_96.malformed_reason() or "")


def test_own_kernel_of_dq_takes_the_slots_that_fit() -> None:
    assert resources.dq_stages(TWO_KERNELS) == (2, 2)
    assert resources.dq_stages(replace(TWO_KERNELS, d_head=96, d_head_v=96)) == (2, 2)
    assert resources.dq_stages(SPLIT) == (1, 1)
    assert SPLIT.smem_bytes() <= resources.MAX_SMEM_BYTES


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_head", STEPS)
def test_ladders_are_feasible_with_their_mask(d_head: int, causal: bool) -> None:
    for rung in get_hopper_backward_ladder(d_head=d_head, causal=causal):
        assert rung.config.infeasible_reason(H100, BackwardTraits(causal=causal)) is None, rung.step.idea
    with pytest.raises(ValueError, match="no Hopper backward ladder for head size 96"):
        get_hopper_backward_ladder(d_head=96)


def test_tuning_takes_the_choices_and_their_neighbours() -> None:
    configs = get_hopper_backward_tuning_configs()
    assert {kernel.config for kernel in get_hopper_backward_kernels()} <= set(configs)
    assert len(configs) > 40
    assert all(config.malformed_reason() is None for config in configs)
