"""The Ampere family's backward configurations: names, rules, choices for each GPU, what the gates ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashBackwardKernelConfig,
    device_facts,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.ampere.backward.choices import (
    CHOICES,
    choices_for,
    get_ampere_best_backward_kernels,
)
from flash_helpers.kernels.ampere.backward.config import DQSum, DQWarps
from flash_helpers.kernels.ampere.backward.defaults import defaults
from flash_helpers.kernels.ampere.backward.gates import violations
from flash_helpers.kernels.ampere.backward.sets import get_backward_tuning_configs, untuned_reason
from flash_helpers.kernels.gates import MachineCode
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits

PLAIN = FlashBackwardKernelConfig(
    DType.BF16, 128, 128, 64, 128, 8, True, stages=2, ds_slots=2, dq_warps=DQWarps.BOTH
)
OWN = replace(PLAIN, dq_sum=DQSum.OWN_KERNEL, dq_warps=DQWarps.GRADIENT, dq_B_r=256, dq_B_c=32, dq_n_warps=8)
ALL_TRAITS = BackwardTraits(True, True, True, True, True)


def problem(d_head: int, d_head_v: int, deterministic: bool = False) -> AttentionProblem:
    """A backward call of these head sizes."""
    call = AttentionProblem(DType.FP16, 2, 500, 700, 8, 4, d_head, d_head_v)
    return call.backward(deterministic)


# ---------------------------------------------------------------------- names
def test_names_say_what_differs_from_the_plainest() -> None:
    assert PLAIN.short_form() == "(BF16, 128, 64, 128, 8): backward+swizzled+stages_2+ds_slots_2+dq_all_warps"
    assert replace(PLAIN, d_head=192, B_c=64).short_form().startswith("(BF16, 192/128, 64, 64, 8): ")
    assert OWN.short_form().endswith("+ds_slots_2+own_kernel+dq_B_r_256+dq_B_c_32+dq_n_warps_8")


def test_every_name_is_read_back() -> None:
    configs = get_backward_tuning_configs()
    assert len(configs) > 100
    for config in (*configs, OWN):
        assert parse_kernel_name_into_config(config.short_form()) == config
        assert parse_kernel_name_into_config(config.to_cpp_struct()) == config


# ---------------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(d_head=96), "d_head is 96; this family has 64, 128, 192 and 256"),
        (dict(d_head_v=320), "d_head_v is 320"),
        (dict(B_r=32), "B_r is 32; it must be 64 or 128"),
        (dict(n_warps=6), "n_warps is 6; it must be 4, 8, 12 or 16"),
        (dict(stages=4), "stages is 4; it must be 1 to 3"),
        (dict(ds_slots=3), "ds_slots is 3; it must be 1 or 2"),
        (dict(B_c=96), "so B_c must be a multiple of 64"),
        (dict(n_warps=4, B_r=128, B_c=64), "no more than 64"),
        (dict(d_head=64, paired_warps=True), "must be multiples of 128"),
        (dict(dq_B_r=64), "make them 0, or dq_sum OWN_KERNEL"),
        (dict(n_warps=4, B_c=64, B_r=64, dq_warps=DQWarps.SCORE, d_head=128), None),
        (dict(n_warps=16, B_c=256, dq_warps=DQWarps.BOTH), "1, 2 or 4 must share its columns"),
        (dict(d_head=64, d_head_v=64, dq_sum=DQSum.ORDERED), "multiples of 32 columns"),
    ],
)
def test_what_no_gpu_can_run_is_refused_by_name(changes: dict[str, Any], words: str | None) -> None:
    reason = replace(PLAIN, **changes).malformed_reason()
    assert reason == words if words is None else words in (reason or "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(dq_n_warps=3), "dq_n_warps is 3; it must be 2, 4, 8 or 16"),
        (dict(dq_B_r=192), "each owns a multiple of 16 queries, so it must be a multiple of 128"),
        (dict(dq_B_c=48), "it must be a multiple of that and of 16"),
    ],
)
def test_the_kernel_that_makes_dq_has_rules_too(changes: dict[str, Any], words: str) -> None:
    assert OWN.malformed_reason() is None
    assert words in (replace(OWN, **changes).malformed_reason() or "")


def test_shared_memory() -> None:
    tiles = 4 * 32768  # K, V, two Q, two dO
    rows, barriers = 2 * 2 * 64 * 4, 8 * (2 + 8 + 8 + 4)
    assert PLAIN.smem_bytes() == tiles + 16384 + 2 * 16384 + rows + barriers
    assert OWN.smem_bytes() == PLAIN.smem_bytes() - 2 * 16384  # nobody reads dS from shared memory
    assert OWN.dq_smem_bytes() == 2 * 65536 + 2 * 16384 + 2 * 256 * 4 + 8 * 9
    pairs = replace(PLAIN, paired_warps=True)  # their P lies there in two forms, for dV and for dS
    assert pairs.smem_bytes() == PLAIN.smem_bytes() + 16384 == pairs.smem_bytes_for(ALL_TRAITS)
    half = replace(pairs, dtype=DType.FP16)
    assert half.smem_bytes() == PLAIN.smem_bytes() == half.smem_bytes_for(ALL_TRAITS) - 16384


def test_what_does_not_fit_a_gpu_is_refused_by_name() -> None:
    assert PLAIN.infeasible_reason(device_facts("H100")) is None
    assert "181424 bytes of shared memory" in (PLAIN.infeasible_reason(device_facts("A100")) or "")
    large = replace(OWN, B_c=64, stages=1)
    assert "the kernel that makes dQ needs" in (large.infeasible_reason(device_facts("RTX4090")) or "")
    held = replace(PLAIN, holds_K=True, holds_V=True)
    assert "take 256 registers of a thread" in (held.infeasible_reason(device_facts("H100")) or "")


def test_only_sums_in_any_order_are_not_deterministic() -> None:
    assert [replace(PLAIN, dq_sum=how).deterministic for how in DQSum] == [False, True, True]


# ---------------------------------------------------------------------- choices
@pytest.mark.parametrize("facts", KNOWN_DEVICES.values(), ids=lambda facts: facts.name)
def test_choices_fit_their_gpu_with_every_trait(facts: Any) -> None:
    kernels = get_ampere_best_backward_kernels(capability=facts.capability)
    assert len(kernels) == 2 * 2 * 2 * len(choices_for(facts.capability))
    for kernel in kernels:
        assert kernel.config.infeasible_reason(facts, ALL_TRAITS) is None, kernel.short_form()


@pytest.mark.parametrize("facts", KNOWN_DEVICES.values(), ids=lambda facts: facts.name)
def test_every_head_size_has_a_kernel_repeatable_or_not(facts: Any) -> None:
    for d_head in range(8, 257, 8):
        for d_head_v in {8, d_head, 128, 256}:
            for deterministic in (False, True):
                found = defaults(problem(d_head, d_head_v, deterministic), facts)
                assert found is not None
                config, reason = found.whole
                assert config.dtype is DType.FP16
                assert config.d_head >= d_head
                assert config.d_head_v >= d_head_v
                assert config.deterministic == deterministic
                assert ("equal bits" in reason) == deterministic


def test_what_is_chosen_is_tuned_too() -> None:
    assert {choice.form(DType.BF16, d) for choice in CHOICES for d in (False, True)} <= set(
        get_backward_tuning_configs([DType.BF16])
    )
    assert "it would spill" in (untuned_reason(replace(PLAIN, holds_K=True)) or "")


def test_newer_gpus_have_the_choices_of_the_next_older_one() -> None:
    assert choices_for((10, 0)) == choices_for((9, 0))
    assert choices_for((12, 0)) == choices_for((8, 9))
    assert choices_for((7, 5)) == []
    assert {choice.capability for choice in CHOICES} == {(8, 0), (8, 6), (8, 9), (9, 0)}


# ---------------------------------------------------------------------- gates
@dataclass
class Opcode:
    """An instruction, as the gates see one."""

    opcode: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


def code(config: FlashBackwardKernelConfig, **counts: int) -> MachineCode:
    """Machine code of a good kernel, with other numbers of some opcodes."""
    numbers = dict(HMMA=config.products_per_block, LDSM=128, MUFU=64, LDGSTS=12, REDG=16, IMAD=200) | counts
    loop = [Opcode(name) for name, number in numbers.items() for _ in range(number)]
    return MachineCode((), 0, loop, loop, loop)


def test_gates_name_what_a_kernel_lacks() -> None:
    assert PLAIN.products_per_block == 128 + 128 + 64
    assert violations(PLAIN, code(PLAIN)) == []
    for counts, words in (
        (dict(MUFU=63), "63 exponentials; each of its 64 scores has one"),
        (dict(LDGSTS=0), "no cp.async"),
        (dict(IMAD=900), "instructions; its products and scores take"),
        (dict(REDG=0), "nothing adds to the sums of dQ"),
        (dict(LDL=17), "17 accesses to local memory, more than 16"),
    ):
        (found,) = violations(PLAIN, code(PLAIN, **counts))
        assert words in found
    spilled = replace(
        code(PLAIN), spill_bytes=321, warnings=("C7512", "Registers are spilled to local memory")
    )
    assert violations(PLAIN, spilled) == ["ptxas: C7512", "321 bytes of registers are spilled, more than 320"]
    assert "dQ has a kernel of its own" in violations(OWN, code(OWN))[0]
    assert violations(OWN, code(OWN, REDG=0)) == []
