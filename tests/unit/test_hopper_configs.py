"""Hopper configurations: names there and back, choices, the ladder, feasibility, agreement with C++."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    ForwardTraits,
    HopperForwardKernelConfig,
    NextItem,
    SoftmaxReference,
    choose_hopper_kernel,
    device_facts,
    get_hopper_best_kernels,
    get_hopper_kernels_to_build,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.choices import CAPPED_CHOICES, CHOICES
from flash_helpers.kernels.hopper.forward.invariant import INVARIANT
from flash_helpers.kernels.hopper.forward.mod_choices import COPIED_CHOICES, MOD_CHOICES, STEP_CHOICES
from flash_helpers.kernels.hopper.forward.rules import PRODUCT_WIDTHS
from flash_helpers.kernels.hopper.forward.varlen_choices import PACKED_CHOICES, SPLIT_CHOICES, VARLEN_CHOICES
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.select import Choice, select

CFG = HopperForwardKernelConfig(
    DType.BF16, 128, 128, 128, 128, 2, 2, True, True, SoftmaxReference.LAGGED, True,
    NextItem.AFTER_LAST_PV, False, True, True,
)  # fmt: skip
SHORT = (
    "(BF16, 128, 128, 128, 2wg): "
    "tma+kv_2+q_2+overlap+ping_pong+lagged+forced_overlap+next_after_pv+dynamic+sections"
)


def test_config_is_frozen_ordered_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        CFG.B_r = 64  # type: ignore[misc]
    assert replace(CFG, B_c=64) < CFG < replace(CFG, next_item=NextItem.AFTER_LAST_PV, d_head=192)
    assert len({CFG, replace(CFG)}) == 1


def test_short_form() -> None:
    assert CFG.short_form() == SHORT
    assert CFG.short_form(include_d_head=False).startswith("(BF16, 128, 128, 2wg): tma")
    assert CFG.short_form(include_tup=False) == SHORT.split(": ")[1]
    assert replace(CFG, d_head=192).short_form().startswith("(BF16, 192/128, 128, 128, 2wg): ")


@pytest.mark.parametrize("kernel", get_hopper_kernels_to_build(), ids=ForwardKernel.short_form)
def test_every_built_kernel_is_feasible_and_read_back_from_its_names(kernel: ForwardKernel) -> None:
    config = kernel.config
    assert config.infeasible_reason(device_facts("H100")) is None
    for name in (config.short_form(), config.to_cpp_struct(), config.kernel_name()):
        assert parse_kernel_name_into_config(name) == config


def test_words_of_later_fields_come_last_and_are_read_back() -> None:
    config = replace(
        CFG,
        early_pass=True,
        trimmed=True,
        paired_blocks=True,
        section_heads=12,
        prefetch_next=3,
        extra_k_stages=1,
        q_register_steps=2,
        keys_once=True,
    )
    assert config.short_form().endswith(
        "+sections+early_pass+trimmed+paired+heads_12+prefetch_3+more_k_1+q_regs_2+keys_once"
    )
    for name in (config.short_form(), config.to_cpp_struct(), config.kernel_name()):
        assert parse_kernel_name_into_config(name) == config


def test_compiler_names_are_read_back() -> None:
    demangled = (
        "void flash::hopper::hopper_forward_kernel<HopperForwardKernelConfig{(DType)15, 128, 128, 128, "
        "128, 2, 2, true, true, (SoftmaxReference)2, true, (NextItem)2, false, true, true}, "
        "ForwardTraits{true}>(CUtensorMap)"
    )
    mangled = (
        "_ZN5flash6hopper21hopper_forward_kernelIXtl25HopperForwardKernelConfigL5DType15ELi128ELi128ELi128ELi128E"
        "Li2ELi2ELb1ELb1EL16SoftmaxReference2ELb1EL8NextItem2ELb0ELb1ELb1EEEXtl13ForwardTraitsLb1EEEEEv"
    )
    assert parse_kernel_name_into_config(demangled) == CFG
    assert parse_kernel_name_into_config(mangled) == CFG
    short = demangled.replace(", (NextItem)2, false, true, true}", "}")  # trailing zeros are left out
    plain = replace(CFG, next_item=NextItem.NONE, dynamic_schedule=False, head_sections=False)
    assert parse_kernel_name_into_config(short) == plain


@pytest.mark.parametrize(
    "name",
    [
        SHORT + "+warp",  # no such word
        SHORT + "+lagged",  # twice
        SHORT + "+heads_4+heads_8",
        SHORT + "+heads_0",
        SHORT.replace("lagged+", ""),  # no softmax
        SHORT.replace("2wg", "3wg"),  # not B_r / 64
        SHORT.replace("next_after_pv", "next_after_pv+next_with_pv"),
        SHORT + " + trimmed",
        SHORT + "-trimmed",
        "x" + SHORT,
        SHORT.replace("kv_2", "kv_02"),
        "HopperForwardKernelConfig{}",
        "HopperForwardKernelConfig{DType::FP8, 128}",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="names no Hopper kernel configuration"):
        parse_kernel_name_into_config(name)


HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


TABLES = {
    "all": CHOICES, "varlen": VARLEN_CHOICES, "split": SPLIT_CHOICES, "packed": PACKED_CHOICES,
    "capped": CAPPED_CHOICES, "mod": MOD_CHOICES, "steps": STEP_CHOICES,
    "copied": COPIED_CHOICES,
}  # fmt: skip


@pytest.mark.parametrize("choices", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("d_heads", HEAD_SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_choices_cover_every_length_and_mask_once(
    choices: tuple[HopperChoice, ...], d_heads: tuple[int, int], causal: bool
) -> None:
    fitting = [choice for choice in choices if choice.fits(*d_heads, causal, seq_len=1)]
    limits = [choice.max_seq_len for choice in fitting]
    first_unlimited = limits.index(None)  # what stands behind it is of tables that end another one
    limits = limits[: first_unlimited + 1]
    assert limits[:-1] == sorted({limit for limit in limits[:-1] if limit})
    for choice in choices:
        assert choice.config.infeasible_reason(device_facts("H100")) is None


def test_problems_that_leave_sms_idle_get_small_blocks() -> None:
    def chosen(heads: int, seq_len: int, keys: int | None = None, d: int = 128, **more: Any) -> Choice:
        problem = AttentionProblem(
            DType.BF16, 1, seq_len, keys or seq_len, heads, heads, d, more.pop("d_v", d), **more
        )
        return select(problem, device_facts("H200"))

    for d, d_v in HEAD_SIZES:
        for right in (None, 0):
            choice = chosen(8, 512, d=d, d_v=d_v, right=right)
            assert choice.kernel.config.B_r == 64
            assert choice.n_splits == 1
    assert chosen(8, 1024).kernel.config.B_r == 64  # 128 blocks of 64 queries, 132 SMs
    assert chosen(9, 1024).kernel.config.B_r == 128
    assert chosen(8, 512, 4096).kernel.traits.split  # many keys: in parts
    one_each = chosen(8, 2048).kernel.config  # 128 blocks of 128 queries
    assert one_each.direct_store
    assert not one_each.paired_blocks
    assert chosen(9, 2048).kernel.config.paired_blocks
    for heads, rows in ((8, 64), (16, 128), (17, 256)):  # 64 blocks of 256 queries were half of the SMs
        choice = chosen(heads, 1024, d=64)
        assert (choice.kernel.config.B_r, choice.n_splits) == (rows, 1)


def test_few_keys_are_one_tile() -> None:
    def chosen(keys: int, **traits: bool) -> HopperForwardKernelConfig:
        on = ForwardTraits(**traits)
        return choose_hopper_kernel(DType.BF16, 64, on.causal, 4096, traits=on, n_keys=keys)[0].config

    for keys in (1, 77, 80):  # of 4096 queries
        assert (chosen(keys).B_c, chosen(keys, softcap=True).q_stages) == (80, 4)
    assert (chosen(81).B_c, chosen(256).q_stages) == (64, 3)
    assert chosen(257) == chosen(4096)
    assert chosen(77, causal=True) == chosen(4096, causal=True)
    assert choose_hopper_kernel(DType.BF16, 64, False, 4096)[0].config == chosen(4096)
    for queries, rows in ((77, 128), (128, 128), (129, 192), (200, 128), (4096, 192)):
        few = choose_hopper_kernel(DType.BF16, 64, False, queries, n_keys=77)[0].config
        assert (few.B_r, few.B_c, few.q_stages) == (rows, 80, 4)


def test_sequences_of_up_to_64_are_one_small_tile() -> None:
    for d_head, kv_stages in ((64, 6), (128, 4)):
        for causal in (False, True):
            for length in (1, 32, 64):
                config = choose_hopper_kernel(DType.BF16, d_head, causal, length, n_keys=length)[0].config
                assert (config.B_r, config.B_c, config.q_stages) == (64, 64, 4)
                assert config.kv_stages == kv_stages
            for queries, keys in ((65, 64), (64, 65)):
                assert (
                    choose_hopper_kernel(DType.BF16, d_head, causal, queries, n_keys=keys)[0].config.B_r
                    == 128
                )


ROWS_OF_BLOCKS = {
    "plain": ({}, {1: 128, 128: 128, 129: 192, 193: 256, 256: 256, 257: 192, 384: 192, 385: 256, 512: 256}),
    "causal": ({"causal": True}, {128: 128, 256: 256, 300: 192, 512: 256, 640: 128, 1000: 256, 16384: 192}),
    "capped": ({"softcap": True}, {128: 128, 256: 256, 300: 128, 512: 256}),
    "packed": ({"varlen": True}, {64: 128, 256: 256, 300: 128, 512: 256}),
    "packed, causal": ({"varlen": True, "causal": True}, {64: 128, 192: 192, 256: 128, 300: 192, 512: 192}),
    "mod": ({"mod": True}, {128: 128, 256: 256, 300: 128, 512: 256}),
}


@pytest.mark.parametrize(("wanted", "rows"), ROWS_OF_BLOCKS.values(), ids=ROWS_OF_BLOCKS)
def test_blocks_are_no_taller_than_sequences_fill(wanted: dict[str, bool], rows: dict[int, int]) -> None:
    on = ForwardTraits(**{name: value for name, value in wanted.items() if name != "mod"})
    for seq_len, height in rows.items():
        kernel, reason = choose_hopper_kernel(
            DType.BF16, 64, on.causal, seq_len, traits=on, mod=wanted.get("mod", False)
        )
        assert isinstance(kernel.config, HopperForwardKernelConfig)
        assert kernel.config.B_r == height, seq_len
        assert reason


def test_the_reason_names_the_rows_that_would_be_empty() -> None:
    _, reason = choose_hopper_kernel(DType.BF16, 64, False, 128)
    assert reason.startswith("blocks of 256 rows would compute 256 for 128 queries, these 128: ")
    _, reason = choose_hopper_kernel(DType.BF16, 64, False, 300)
    assert reason.startswith("blocks of 256 rows would compute 512 for 300 queries, these 384: ")
    assert "would compute" not in choose_hopper_kernel(DType.BF16, 64, False, 512)[1]


def test_packed_sequences_get_taller_blocks_where_nothing_else_is_wanted() -> None:
    def rows(mod: bool = False, **traits: bool) -> int:
        on = ForwardTraits(varlen=True, **traits)
        return choose_hopper_kernel(DType.BF16, 64, on.causal, 4096, traits=on, mod=mod)[0].config.B_r

    assert (rows(), rows(causal=True)) == (256, 192)
    assert rows(window=True) == rows(softcap=True) == rows(paged=True) == rows(mod=True) == 128


@pytest.mark.parametrize("d_heads", HEAD_SIZES)
def test_choices_for_traits(d_heads: tuple[int, int]) -> None:
    def chosen(seq_len: int, **traits: bool) -> ForwardKernel:
        on = ForwardTraits(**traits)
        kernel, reason = choose_hopper_kernel(
            DType.BF16, d_heads[0], False, seq_len, d_head_v=d_heads[1], traits=on
        )
        assert reason
        assert kernel.traits == on
        assert (kernel.config.d_head, kernel.config.d_head_v) == d_heads
        return kernel

    for seq_len in (1, 512, 4096):
        plain = chosen(seq_len).config
        assert not plain.dynamic_schedule
        capped = chosen(seq_len, softcap=True, sinks=True, padded_head=True).config
        assert replace(capped, paired_blocks=plain.paired_blocks) == plain
        assert capped.paired_blocks == (plain.paired_blocks and d_heads[0] != 256)
        assert chosen(seq_len, window=True).config.dynamic_schedule
        assert chosen(seq_len, varlen=True).config.dynamic_schedule
        # Finding sequences takes registers that more consumers have not.
        assert chosen(seq_len, varlen=True, window=True).config.n_consumers <= 2
        assert chosen(seq_len, split=True).config.n_consumers == (1 if seq_len == 1 else 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_choose_hopper_kernel(causal: bool, exact: bool) -> None:
    for d_head in (64, 96, 128, 192, 256):
        for seq_len in (1, 1024, 1025, 2048, 2049, 16384):
            kernel, reason = choose_hopper_kernel(DType.FP16, d_head, causal, seq_len, exact)
            assert isinstance(kernel.config, HopperForwardKernelConfig)
            assert (kernel.config.dtype, kernel.config.d_head) == (DType.FP16, d_head)
            assert kernel.traits.causal == kernel.config.dynamic_schedule == causal
            assert (kernel.config.softmax_reference == SoftmaxReference.LAGGED) == (not exact)
            assert kernel in get_hopper_best_kernels()
            assert reason


def test_choose_hopper_kernel_names_the_head_sizes_it_has() -> None:
    with pytest.raises(
        ValueError, match="head size 80; there are choices for 128, 192, 192/128, 256, 64, 96"
    ):
        choose_hopper_kernel(DType.FP16, 80, causal=False, seq_len=512)


def test_resources_by_hand() -> None:
    # two Q slots of 128 rows, two K and two V slots of 128 rows, 128 columns of 2 bytes; 1 KiB
    assert CFG.smem_bytes() == (2 * 128 + 2 * 2 * 128) * 256 + 1024 == 197632
    assert replace(CFG, d_head=96, d_head_v=96).smem_bytes() == CFG.smem_bytes()  # padded to 128 columns
    assert (CFG.n_consumers, CFG.n_threads, CFG.n_warps) == (2, 384, 12)
    assert CFG.num_ctas_per_sm(228 * 1024) == 1
    assert CFG.resident_registers() == 64 + 64 + 32  # S, O, P of 16-bit pairs
    assert CFG.attn_flop(2, 3, 64) == 4 * 2 * 3 * 64 * 64 * 128
    assert replace(CFG, d_head=192).attn_flop(1, 1, 64) == 2 * 64 * 64 * (192 + 128)
    # one row, 128 keys: 5 a score, one step of 128 + 4, 128 divisions
    assert CFG.total_flop(1, 1, 128) == CFG.attn_flop(1, 1, 128) + 128 * (5 * 128 + 132 + 128)


INFEASIBLE: list[tuple[dict[str, Any], str]] = [
    (dict(d_head=80), "d_head is 80.*64, 96, 128"),
    (dict(d_head_v=80), "d_head_v is 80"),
    (dict(B_r=96), "B_r is 96.*64, 128, 192, 256"),
    (dict(B_r=320), "B_r is 320"),
    (dict(B_c=72), "B_c is 72.*64, 80"),
    (dict(kv_stages=1), "kv_stages is 1.*2 to 8"),
    (dict(q_stages=0), "q_stages is 0.*1 to 4"),
    (dict(d_head=64), "choose direct_store"),
    (dict(B_r=64, next_item=NextItem.NONE), "ping_pong: B_r is 64"),
    (dict(overlap_products=False, next_item=NextItem.NONE), "forced_overlap needs overlap_products"),
    (dict(overlap_products=False, forced_overlap=False), "next_item needs overlap_products"),
    (dict(q_stages=1, next_item=NextItem.WITH_LAST_PV), "choose q_stages of 2"),
    (dict(q_stages=1, direct_store=True), "AFTER_LAST_PV holds its turn"),
    (dict(B_r=192, next_item=NextItem.WITH_LAST_PV), "take 160 registers.*leave 132"),
    (dict(early_pass=True, ping_pong=False), "early_pass is about turns"),
    (dict(prefetch_next=17), "prefetch_next is 17.*0 to 16"),
    (dict(B_r=192, B_c=64, prefetch_next=1, next_item=NextItem.NONE), "prefetch_next: B_r is 192"),
    (dict(q_register_steps=9), "q_register_steps is 9.*has 8 steps"),
    (dict(chunk_tiles=8), "chunk_tiles is 8.*softmax_reference LAGGED_BY_ROW"),
    (dict(chunk_tiles=-1), "chunk_tiles is -1; it must be 0"),
    (dict(extra_k_stages=7), "extra_k_stages is 7.*0 to 6"),
    (dict(section_heads=8, head_sections=False), "section_heads is 8.*positive with head_sections"),
    (dict(section_heads=-1), "section_heads is -1"),
    (dict(kv_stages=8), "590848 bytes of shared memory.*232448"),
]


@pytest.mark.parametrize(("change", "message"), INFEASIBLE, ids=[m for _, m in INFEASIBLE])
def test_infeasible_reason(change: dict[str, Any], message: str) -> None:
    reason = replace(CFG, **change).infeasible_reason(device_facts("H100"))
    assert reason is not None
    assert re.search(message, reason), reason


def test_other_generations_are_refused() -> None:
    assert "kernels of the hopper family run on 9.0 only" in (
        CFG.infeasible_reason(device_facts("A100")) or ""
    )
    blackwell = replace(device_facts("H100"), name="B200", capability=(10, 0))
    assert "compute capability 10.0" in (CFG.infeasible_reason(blackwell) or "")


def test_what_chunks_leave_is_kept_in_shared_memory_as_far_as_there_is_room() -> None:
    # a slot: 16 bytes of 256 threads; O of 128 columns has 16, sums and references two
    cut = INVARIANT[128, 128].many
    assert cut.smem_bytes() == 197632 + 8 * 4096
    assert cut.kept_sums(132) == 132 * (16 + 2 - 8) * 1024
    assert replace(cut, chunk_tiles=0).smem_bytes() == 197632
    assert replace(cut, chunk_tiles=0).kept_sums(132) == 0
    narrow = INVARIANT[64, 64].many  # 256 x 64, two Q slots: eight of ten slots
    assert narrow.smem_bytes() == (2 * 256 + 12 * 64) * 128 + 1024 + 8 * 8192
    assert narrow.kept_sums(132) == 132 * 2 * 2048
    assert replace(narrow, kv_stages=5).kept_sums(132) == 0


# ---------------------------------------------------------------- agreement with C++
def host_compile(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert compiler, "no C++ compiler found: install g++ or clang++, or set CXX"
    (folder / "source.cpp").write_text(source)
    command = [*compiler.split(), "-std=c++20", "-fsyntax-only", f"-I{include_root()}", "source.cpp"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.compile
def test_cpp_derives_the_same_resources(tmp_path: Path) -> None:
    lines = ['#include "hopper/forward/static_kernel_configuration.cuh"', "using namespace flash::hopper;"]
    invariant = [
        ForwardKernel(c) for own in INVARIANT.values() for c in (own.few, own.many, own.long, own.packed)
    ]
    for kernel in [*get_hopper_kernels_to_build(), *invariant]:
        config = kernel.config
        assert isinstance(config, HopperForwardKernelConfig)
        static = f"StaticForwardKernelConfig<{config.to_cpp_struct()}, {kernel.traits.to_cpp_struct()}>"
        lines.append(f"static_assert({static}::smem_bytes == {config.smem_bytes()});")
        lines.append(f"static_assert({static}::n_threads == {config.n_threads});")
        in_memory = f"({static}::wanted_kept_slots - {static}::kept_slots) * {static}::kept_slot_bytes"
        lines.append(f"static_assert({in_memory} == 4 * {config.kept_sums(1)});")
    compiled = host_compile("\n".join(lines), tmp_path)
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.compile
@pytest.mark.parametrize(
    "change",
    [change for change, message in INFEASIBLE if "registers" not in message and "B_c" not in change],
    ids=str,
)
def test_cpp_refuses_what_python_refuses(change: dict[str, Any], tmp_path: Path) -> None:
    config = replace(CFG, **change)
    source = (
        '#include "hopper/forward/static_kernel_configuration.cuh"\n'
        f"constexpr int bytes = flash::hopper::StaticForwardKernelConfig<{config.to_cpp_struct()}, "
        "ForwardTraits{}>::smem_bytes;"
    )
    compiled = host_compile(source, tmp_path)
    assert "static assertion failed" in compiled.stderr, compiled.stderr


def test_product_widths_are_those_of_the_header() -> None:
    text = (include_root() / "hopper" / "wgmma.cuh").read_text()
    assert tuple(map(int, re.findall(r"^FLASH_WGMMA_SHAPE\((\d+),", text, re.MULTILINE))) == PRODUCT_WIDTHS
