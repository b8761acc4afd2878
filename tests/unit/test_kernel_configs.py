"""Configurations: names there and back, sets, feasibility, work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    device_facts,
    get_autotuning_kernel_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    get_kernels_to_build,
    parse_kernel_name_into_config,
    should_autotune_config,
)
from flash_helpers.kernel_selection import parse_short_form
from flash_helpers.kernels.ampere.forward.sets import BLOCK_SIZES

CFG = FlashForwardKernelConfig(DType.FP16, 128, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
SHORT = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"


def test_fields_are_the_specified_ones_in_order() -> None:
    assert [f.name for f in fields(FlashForwardKernelConfig)][:13] == [
        "dtype", "d_head", "B_r", "B_c", "n_warps", "async_copy", "eager_load_blocks", "swizzled",
        "Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles", "mma_double_buffer_loads",
        "optimized_softmax",
    ]  # fmt: skip


def test_config_is_frozen_ordered_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        CFG.B_r = 128  # type: ignore[misc]
    assert CFG < replace(CFG, B_r=128) < replace(CFG, dtype=DType.BF16)
    assert len({CFG, replace(CFG)}) == 1


def test_short_form() -> None:
    assert CFG.short_form() == SHORT
    assert CFG.short_form(include_d_head=False).startswith("(FP16, 64, 64, 4): async")
    assert CFG.short_form(include_tup=False) == SHORT.split(": ")[1]
    assert ForwardKernel(CFG).short_form() == SHORT
    assert ForwardKernel(CFG, ForwardTraits(causal=True)).short_form() == SHORT + " | causal"
    assert parse_kernel_name_into_config(SHORT + " | causal+padded_head") == CFG


@pytest.mark.parametrize("cfg", get_kernels_to_build(), ids=lambda cfg: cfg.short_form())
def test_every_built_config_is_read_back_from_each_of_its_names(cfg: FlashForwardKernelConfig) -> None:
    assert parse_kernel_name_into_config(cfg.short_form()) == cfg
    assert parse_kernel_name_into_config(cfg.to_cpp_struct()) == cfg
    assert parse_kernel_name_into_config(cfg.kernel_name()) == cfg
    values = [int(getattr(cfg, f.name)) for f in fields(cfg)]
    typed = ["(DType)5" if cfg.dtype == DType.FP16 else "(DType)15"]
    typed += [
        ("(bool)" if f.type == "bool" else "(int)") + str(v) for f, v in zip(fields(cfg), values, strict=True)
    ][1:]
    while typed[-1].endswith(")0"):  # compilers leave out trailing zeros
        typed.pop()
    name = "void flash::flash_forward_kernel<FlashForwardKernelConfig{%s}, ForwardTraits{}>(args)"
    assert parse_kernel_name_into_config(name % ", ".join(typed)) == cfg


def test_compiler_names_are_read_back() -> None:
    demangled = (
        "void flash::flash_forward_kernel<FlashForwardKernelConfig{(DType)5, 128, 64, 64, 4, true, true, "
        "true, 0, 2, 2, true, true}, ForwardTraits{true}>(flash::ForwardKernelArgs)"
    )
    mangled = (
        "_ZN5flash20flash_forward_kernelIXtl24FlashForwardKernelConfigL5DType5ELi128ELi64ELi64ELi4ELb1ELb1E"
        "Lb1ELi0ELi2ELi2ELb1ELb1EEEXtl13ForwardTraitsLb1EEEEEvNS_17ForwardKernelArgsE"
    )
    assert parse_kernel_name_into_config(demangled) == CFG
    assert parse_kernel_name_into_config(mangled) == CFG


@pytest.mark.parametrize(
    "name",
    [
        "",
        "void other<3>(int)",
        "(FP16, 64, 64, 4): async+load_0_0_0_tiles",
        SHORT + "+warp",
        SHORT + " + causal",  # nothing behind a name is silently left out
        SHORT + "-causal",
        SHORT.replace("+", " + "),
        "x" + SHORT,
        SHORT + SHORT,
        SHORT + "+async",  # twice
        SHORT + "+kv_stages_2+kv_stages_3",
        SHORT + "+lagged+anchored",
        SHORT + "+kv_stages",  # a number without one
        SHORT + "+mbarrier_0",
        SHORT + "+softmax_reference_9",
        SHORT + "+kv_stages_²",
        SHORT.replace("load_0", "load_00"),
        "FlashForwardKernelConfig{}",
        "FlashForwardKernelConfig{DType::FP8, 128}",
        "FlashForwardKernelConfig{a, b}",
        f"FlashForwardKernelConfig{{{', '.join(['5'] * 40)}}}",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="names no kernel configuration"):
        parse_kernel_name_into_config(name)


@pytest.mark.parametrize("text", ["fp16", "FP16", "Half", "float16", "torch.float16", "5", 5])
def test_dtype_from_string(text: str | int) -> None:
    assert DType.from_string(text) is DType.FP16


@pytest.mark.parametrize("text", ["fp32", "", "6", "bf", 7])
def test_unknown_dtype_lists_the_valid_ones(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"FP16 .*5.*BF16 .*15"):
        DType.from_string(text)


def test_dtype_numbers_are_torchs() -> None:
    import torch

    assert (DType.FP16, DType.BF16) == (5, 15)
    assert DType.BF16.to_torch_dtype() is torch.bfloat16
    assert DType.FP16.to_cpp_str() == "DType::FP16"


def test_ladder() -> None:
    expected = [
        "async+load_0_0_0_tiles",
        "async+swizzled+load_0_0_0_tiles",
        "async+eager+swizzled+load_0_0_0_tiles",
        "async+eager+swizzled+load_2_2_2_tiles",
        "async+eager+swizzled+load_2_2_2_tiles+buffer",
        "async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
        "async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
    ]
    ladder = get_kernel_progression_configs()
    assert [cfg.short_form(include_tup=False) for cfg in ladder] == expected
    assert {(c.dtype, c.d_head, c.B_r, c.B_c, c.n_warps) for c in ladder} == {(DType.FP16, 128, 64, 64, 4)}
    every_size = get_kernel_progression_configs(all_block_sizes=True)
    assert {(c.B_r, c.B_c) for c in every_size} == {(B_r, B_c) for B_r, B_c, _ in BLOCK_SIZES}


def test_sets_to_build_are_sorted_unique_feasible_and_complete() -> None:
    build = get_kernels_to_build()
    assert build == sorted(set(build))
    assert set(build) >= {*get_kernel_progression_configs(), *get_autotuning_kernel_configs()}
    assert {(c.dtype, c.d_head) for c in build} == {(t, d) for t in DType for d in (64, 128)}
    assert all(cfg.infeasible_reason(device_facts("H100")) is None for cfg in build)
    assert {c.dtype for c in get_autotuning_kernel_configs(dtypes=[DType.BF16])} == {DType.BF16}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (dict(), True),
        (dict(async_copy=False), False),
        (dict(async_copy=False, eager_load_blocks=False), True),
        (dict(Q_mma_load_K_tiles=2, K_mma_load_K_tiles=1, B_r=128), False),
        (dict(B_r=64, n_warps=8), False),
        (dict(B_r=64, B_c=32, Q_mma_load_K_tiles=0), False),
        (dict(B_r=64, B_c=32, Q_mma_load_K_tiles=2), True),
        (dict(B_r=64, B_c=64, Q_mma_load_K_tiles=2), False),
        (dict(B_r=128, Q_mma_load_K_tiles=0), False),
        (dict(B_r=128, Q_mma_load_K_tiles=2, mma_double_buffer_loads=False), True),
        (dict(B_c=128, eager_load_blocks=False), False),
        (dict(B_c=128, eager_load_blocks=False, mma_double_buffer_loads=False), True),
        (dict(d_head=64, B_r=128, B_c=128, Q_mma_load_K_tiles=2, eager_load_blocks=False), False),
        (dict(B_r=128, Q_mma_load_K_tiles=0, d_head=64), True),
    ],
)
def test_should_autotune(change: dict[str, object], kept: bool) -> None:
    assert should_autotune_config(replace(CFG, **change)) is kept


def test_get_kernel_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_kernel_configs("progression") == get_kernel_progression_configs()
    assert get_kernel_configs("prog_all") == get_kernel_progression_configs(all_block_sizes=True)
    assert get_kernel_configs("all") == get_kernels_to_build()
    assert get_kernel_configs("tune") == get_autotuning_kernel_configs()
    by_size = get_kernel_configs("128, 64")
    assert by_size
    assert {(c.B_r, c.B_c) for c in by_size} == {(128, 64)}
    monkeypatch.setenv("KERNELS", "prog")
    assert get_kernel_configs() == get_kernel_progression_configs()
    for bad in ("fast", "48,64", "64", "64,64,4"):
        with pytest.raises(ValueError, match=r"'prog'.*'tune', 'all'.*128,64"):
            get_kernel_configs(bad)


def test_resources_and_work_by_hand() -> None:
    assert CFG.smem_bytes() == (64 + 2 * 64) * 128 * 2 == 49152
    assert CFG.num_ctas_per_sm(228 * 1024) == 4
    assert CFG.attn_flop(16, 16, 4096) == 4 * 16 * 16 * 4096**2 * 128
    # one row of one head, seq 64: 5·64 scores, one step of 128 + 4, 128 divisions
    assert CFG.total_flop(1, 1, 64) == 4 * 64 * 64 * 128 + 64 * (320 + 132 + 128)
    # 16 rows of a warp: O 16·128/32, S 16·64/32, Q 16·128/64
    assert CFG.resident_registers() == 64 + 32 + 32
    assert replace(CFG, Q_mma_load_K_tiles=2).resident_registers() == 64 + 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(d_head=96), "d_head is 96.*64, 128"),
        (dict(B_r=48), "multiple of 64"),
        (dict(B_c=40), "B_c is 40.*multiple of 16"),
        (dict(n_warps=0), "n_warps is 0"),
        (dict(n_warps=3, B_r=48, B_c=48), "n_warps is 3.*even"),
        (dict(n_warps=64, B_r=1024, B_c=256), "n_warps is 64.*at most 32"),
        (dict(n_warps=6, B_r=96, B_c=24), "B_c is 24.*multiple of 48"),
        (dict(V_mma_load_K_tiles=3), "V_mma_load_K_tiles is 3.*4 tiles"),
        (dict(Q_mma_load_K_tiles=4), "advance together"),
        (dict(async_copy=False), "eager_load_blocks needs async_copy"),
        (dict(B_r=512, B_c=256), "262144 bytes of shared memory.*232448"),
    ],
)
def test_infeasible_reason(change: dict[str, object], message: str) -> None:
    import re

    reason = replace(CFG, **change).infeasible_reason(device_facts("H100"))
    assert reason is not None
    assert re.search(message, reason), reason


def test_old_devices_and_small_shared_memory_are_refused() -> None:
    turing = replace(device_facts("A100"), name="Tesla T4", capability=(7, 5))
    assert "run on 8.0 and newer" in (CFG.infeasible_reason(turing) or "")
    wide = replace(CFG, B_r=128, B_c=128, Q_mma_load_K_tiles=2)
    assert wide.infeasible_reason(device_facts("A100")) is None
    assert wide.infeasible_reason(device_facts("RTX 4090")) is None
    assert "allows 101376" in (
        replace(wide, B_r=256, n_warps=8).infeasible_reason(device_facts("RTX3090")) or ""
    )


def test_importing_the_configurations_imports_no_torch() -> None:
    code = "import flash_helpers.kernel_configs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("traits", ["causal", "nonsense"])
def test_traits_behind_a_lone_configuration_are_refused(traits: str) -> None:
    with pytest.raises(ValueError, match=f"'{traits}' stands behind a configuration.*own option"):
        parse_short_form(f"{SHORT} | {traits}")
    assert parse_short_form(SHORT) == CFG
