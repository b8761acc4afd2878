"""The Ampere family's choices for each GPU, its ladder of speed, and the fields that they are made of."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashForwardKernelConfig,
    SoftmaxReference,
    choose_ampere_kernel,
    device_facts,
    get_ampere_best_kernels,
    get_ladder,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.ampere.forward.choices import CHOICES
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.select import select

LADDER = [rung.config for rung in get_ladder("ampere", DType.BF16, 128, False)]
FAST = LADDER[-2]  # 4 warps, everything on
SHORT = (
    "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_1_1_1_tiles+opt_softmax+kv_stages_2+mbarrier+anchored"
    "+tensor_row_sums+fragments_ahead_1"
)


@pytest.mark.parametrize("facts", KNOWN_DEVICES.values(), ids=lambda facts: facts.name)
def test_choices_fit_their_gpu(facts: Any) -> None:
    kernels = get_ampere_best_kernels(capability=facts.capability)
    assert kernels
    for kernel in kernels:
        assert kernel.config.infeasible_reason(facts) is None, kernel.short_form()
        warps = kernel.config.n_warps * kernel.config.num_ctas_per_sm(facts.smem_per_sm)
        assert warps >= 8, f"{kernel.short_form()}: {warps} warps hide nothing on {facts.name}"


def test_a_small_gpu_of_a_later_generation_gets_kernels_that_fit_it() -> None:
    facts = replace(device_facts("RTX4090"), name="NVIDIA GeForce RTX 5090", capability=(12, 0), sm_count=170)
    for dtype, d_head, left, right, lse in itertools.product(
        DType, (40, 64, 128, 256), (None, 9), (None, 0), (0, 1)
    ):
        problem = AttentionProblem(
            dtype, 4, 4096, 4096, 16, 16, d_head, d_head, left=left, right=right, lse=bool(lse)
        )
        choice = select(problem, facts, explained=False)
        assert choice.reason.startswith("the default of the ampere family"), choice.reason
        assert choice.kernel.config.infeasible_reason(facts) is None


def test_every_problem_is_answered_and_every_choice_can_be_made() -> None:
    for capability in {choice.capability for choice in CHOICES}:
        made = {
            choose_ampere_kernel(dtype, d, causal, seq_len, capability, lse, exact)[0]
            for dtype in DType
            for d in (64, 128, 256)
            for causal in (False, True)
            for seq_len in (128, 512, 2048, 16384)
            for lse in (False, True)
            for exact in (False, True)
        }
        assert made == set(get_ampere_best_kernels(capability=capability))


def test_accuracy_decides_reference_and_sums() -> None:
    def config(**wanted: Any) -> FlashForwardKernelConfig:
        dtype = wanted.pop("dtype", DType.BF16)
        kernel, _ = choose_ampere_kernel(dtype, 128, causal=True, seq_len=1024, **wanted)
        assert isinstance(kernel.config, FlashForwardKernelConfig)
        return kernel.config

    assert config().softmax_reference == SoftmaxReference.ANCHORED
    assert config(dtype=DType.FP16).softmax_reference == SoftmaxReference.LAGGED
    assert config(exact=True).softmax_reference == SoftmaxReference.EXACT_SKIP_RESCALE
    assert (config().writes_lse, config(lse=True).writes_lse) == (False, True)


def test_unknown_gpus_take_the_next_lower_choices_and_unknown_heads_are_refused() -> None:
    def chosen(capability: tuple[int, int]) -> object:
        return choose_ampere_kernel(DType.BF16, 128, False, 4096, capability)[0]

    assert chosen((8, 7)) == chosen((8, 6))
    assert chosen((10, 0)) == chosen((9, 0))
    assert chosen((12, 0)) == chosen((8, 9))
    with pytest.raises(ValueError, match=r"7.5.*8.0 or newer"):
        chosen((7, 5))
    with pytest.raises(ValueError, match=r"head size 80.*64, 128, 256"):
        choose_ampere_kernel(DType.BF16, 80, False, 4096)


def test_names_there_and_back() -> None:
    assert FAST.short_form() == SHORT
    for config in {*LADDER, *(k.config for k in get_ampere_best_kernels())}:
        assert isinstance(config, FlashForwardKernelConfig)
        assert parse_kernel_name_into_config(config.short_form()) == config
        assert parse_kernel_name_into_config(config.to_cpp_struct()) == config
    mangled = (
        "_ZN5flash6ampere20flash_forward_kernelIXtl24FlashForwardKernelConfigL5DType15ELi128ELi128ELi64ELi4E"
        "Lb1ELb1ELb1ELi1ELi1ELi1ELb0ELb1ELi2ELb1EL16SoftmaxReference3ELb1ELi1EEEXtl13ForwardTraitsEEEEvv"
    )
    assert parse_kernel_name_into_config(mangled) == FAST


def test_resources_of_pairs_by_hand() -> None:
    pair = replace(FAST, d_head=256, n_warps=8, paired_warps=True)
    # Q, two stages of K and V, barriers, and for each warp half of its scores in float32
    assert pair.smem_bytes() == (128 + 2 * 2 * 64) * 512 + 128 + 8 * 32 * 32 * 4
    assert pair.rows_per_warp == 32
    assert pair.products_per_block == FAST.products_per_block  # as many as with half of d_head, alone
    assert pair.resident_registers() == FAST.resident_registers() == 32 * (128 + 64) // 32


def test_what_chunks_keep_by_hand() -> None:
    exact = SoftmaxReference.EXACT_SKIP_RESCALE
    cut = replace(FAST, softmax_reference=exact, tensor_row_sums=False, chunk_tiles=20)
    assert cut.infeasible_reason(device_facts("A100")) is None
    # Of two blocks an SM each thread of 128 has 64 vectors of O, and of 2 row tiles sums and exponents.
    assert cut.kept_sums(108) == 108 * 2 * 128 * 2 * (16 + 1) * 4
    assert replace(cut, chunk_tiles=0).kept_sums(108) == 0


def test_resources_by_hand() -> None:
    # Q, and two stages of K and V: 128 columns of 2 bytes; barriers
    assert FAST.smem_bytes() == (128 + 2 * 2 * 64) * 256 + 128 == 98432
    # 2 row tiles; 8 steps along d_head by 8 column tiles, 4 steps along the keys by 16; 4 of the sums
    assert FAST.products_per_block == 2 * (8 * 8 + 4 * 16 + 4) == 264


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_stages=0), "kv_stages is 0.*1 to 8"),
        (dict(eager_load_blocks=False), "stages beyond the first need async_copy and eager_load_blocks"),
        (dict(kv_stages=1), "mbarrier needs kv_stages of 2"),
        (dict(fragments_ahead=5), "fragments_ahead is 5.*0 to 4"),
        (dict(K_mma_load_K_tiles=2, Q_mma_load_K_tiles=2), "fragment by fragment; make K's and V's tiles 1"),
        (dict(mma_double_buffer_loads=True), "mma_double_buffer_loads False"),
        (dict(optimized_softmax=False), "ANCHORED needs optimized_softmax"),
        (dict(dtype=DType.FP16), "ANCHORED needs BF16.*choose LAGGED"),
        (dict(n_warps=8, B_r=256, B_c=48), "B_c is 48.*32 rows.*multiple of 32"),
        (dict(paired_warps=True, d_head=64), "paired_warps with d_head 64.*a multiple of 128"),
        (dict(paired_warps=True, B_c=48), "B_c 48.*a multiple of 32"),
        (dict(paired_warps=True, softmax_reference=SoftmaxReference.LAGGED), "one warp of a pair only"),
        (dict(paired_warps=True, B_r=80), "B_r is 80.*multiple of 32"),
        (dict(chunk_tiles=16), "chunk_tiles is 16.*a softmax_reference EXACT"),
        (dict(chunk_tiles=-1), "chunk_tiles is -1; it must be 0"),
    ],
)
def test_infeasible_reason(change: dict[str, Any], message: str) -> None:
    reason = replace(FAST, **change).infeasible_reason(device_facts("H100"))
    assert reason is not None
    assert re.search(message, reason), reason
