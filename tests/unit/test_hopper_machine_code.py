"""The gates on machine code: on made-up code, and, where there is a compiler, on real kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.build import KernelCache, build_library
from flash_helpers.build.gates import HOPPER_RECORD, LADDER_TARGET, kernels_of, load_record, machine_code
from flash_helpers.build.main_loop import hot_path, main_loop
from flash_helpers.build.ptxas import PtxasReport, parse_ptxas
from flash_helpers.build.sass import Instruction, find_tool
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    ForwardTraits,
    choose_hopper_kernel,
)
from flash_helpers.kernels.gates import MachineCode
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.gates import counts, violations
from flash_helpers.kernels.softmax import SoftmaxReference


def with_traits(dtype: DType, d_head: int, seq_len: int, *traits: str, **changes: object) -> ForwardKernel:
    """The kernel chosen for a problem with the traits that are named, with some fields changed."""
    on = ForwardTraits(**dict.fromkeys(traits, True))
    kernel = choose_hopper_kernel(dtype, d_head, on.causal, seq_len, traits=on)[0]
    return replace(kernel, config=replace(kernel.config, **changes))


KERNELS = [
    choose_hopper_kernel(DType.BF16, 64, causal=True, seq_len=4096)[0],
    choose_hopper_kernel(DType.BF16, 64, causal=False, seq_len=512)[0],
    choose_hopper_kernel(DType.FP16, 128, causal=True, seq_len=4096)[0],
    choose_hopper_kernel(DType.BF16, 128, causal=False, seq_len=512, exact=True)[0],
    choose_hopper_kernel(DType.BF16, 256, causal=False, seq_len=4096)[0],
    choose_hopper_kernel(DType.BF16, 192, causal=False, seq_len=4096, d_head_v=128)[0],
    with_traits(DType.BF16, 64, 512, "window"),
    with_traits(DType.BF16, 128, 4096, "softcap"),
    with_traits(DType.FP16, 128, 4096, "causal", "varlen", "sinks", "padded_head"),
    with_traits(DType.BF16, 128, 1, "varlen", "split", keys_once=True),
]
# Of a soft cap the steady loop holds several forms, with the way from one to the other.
CAPPED = [kernel for kernel in KERNELS if kernel.traits.softcap]
IN_SEVERAL_FORMS = ("waits for tiles", "releases of slots", "named barriers", "growth")
CLEAN = PtxasReport(registers=168, spill_bytes=0, static_smem_bytes=0, warnings=())


def code(*lines: str) -> list[Instruction]:
    """Instructions 16 bytes apart; ``BRA n`` goes to the n-th."""
    body = []
    for i, line in enumerate(lines):
        opcode, _, target = line.partition(" ")
        body.append(Instruction(16 * i, opcode, 16 * int(target) if target else None))
    return body


def seen(
    config: HopperForwardKernelConfig,
    body: list[Instruction],
    recorded: dict[str, int] | None = None,
    report: PtxasReport = CLEAN,
) -> MachineCode:
    """What the gates look at."""
    loop = main_loop(body, config.products_per_block)
    return MachineCode(report.warnings, report.spill_bytes, body, loop, hot_path(loop), recorded)


@pytest.fixture
def config() -> HopperForwardKernelConfig:
    """Four products of Q K^T and three of P V."""
    config = choose_hopper_kernel(DType.BF16, 64, causal=False, seq_len=4096)[0].config
    assert isinstance(config, HopperForwardKernelConfig)
    return replace(config, B_c=48)


GOOD = [
    "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC",
    "BAR.SYNC", *["HGMMA.64x48x16"] * 4, *["HGMMA.64x64x16"] * 3, "BAR.ARV",  # 2 ... 10
    "WARPGROUP.DEPBAR.LE", "VIMNMX3", "MUFU.EX2", "WARPGROUP.DEPBAR.LE",  # 11 ... 14
    "BRA 19", "LDSM.16", "HMMA.16816", "BRA 16", "F2FP.BF16",
    *["SYNCS.PHASECHK.TRANS64"] * 2, *["SYNCS.ARRIVE.TRANS64"] * 2, "BRA 2", "EXIT",  # 20 ...
]  # fmt: skip


def test_good_code_passes(config: HopperForwardKernelConfig) -> None:
    assert violations(config, seen(config, code(*GOOD))) == []


def test_steady_loop_is_found_and_its_cold_block_left_out(config: HopperForwardKernelConfig) -> None:
    loop = main_loop(code(*GOOD), config.products_per_block)
    assert (loop[0].address, loop[-1].address) == (16 * 2, 16 * 24)
    hot = hot_path(loop)
    assert [i.name for i in hot[-7:]] == ["BRA", "F2FP", *["SYNCS"] * 4, "BRA"]
    assert counts(seen(config, code(*GOOD)))["total"] == len(loop) - 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("USETMAXREG.DEALLOC", "NOP", "setmaxnreg appears 1 times"),
        ("MUFU.EX2", "LDL", "1 accesses to local memory"),
        ("VIMNMX3", "FMNMX", "three-input integer maxima"),
        ("BAR.ARV", "NOP", "named barriers"),
        ("SYNCS.PHASECHK.TRANS64", "NOP", "0 waits for tiles"),
        ("SYNCS.ARRIVE.TRANS64", "NOP", "0 releases of slots"),
        ("LDSM.16", "WARPGROUP.DEPBAR.LE", "3 waits for products"),
        ("HGMMA.64x64x16", "HMMA.16816", "no loop holds the products"),
    ],
)
def test_each_lack_is_named(config: HopperForwardKernelConfig, old: str, new: str, message: str) -> None:
    body = code(*(new if line == old else line for line in GOOD))
    assert message in "\n".join(violations(config, seen(config, body)))


def test_descriptor_moves_spills_warnings_and_drift_are_named(config: HopperForwardKernelConfig) -> None:
    many_moves = code(*GOOD[:11], *["R2UR"] * 5, *GOOD[11:15], *GOOD[20:])
    assert "5 R2UR, at most 4" in "\n".join(violations(config, seen(config, many_moves)))
    spilled = replace(CLEAN, spill_bytes=8, warnings=("(C7510) serialized",))
    assert violations(config, seen(config, code(*GOOD), report=spilled)) == [
        "ptxas: (C7510) serialized",
        "8 bytes of registers are spilled",
    ]
    recorded = counts(seen(config, code(*GOOD)))
    assert violations(config, seen(config, code(*GOOD), recorded)) == []
    drifted = violations(config, seen(config, code(*GOOD), {**recorded, "MUFU": 2}))
    assert drifted == ["steady loop: 1 MUFU, recorded 2"]


def test_only_kernels_that_are_checked_have_recorded_counts() -> None:
    checked = {kernel.short_form() for kernel in [*kernels_of(LADDER_TARGET), *KERNELS]}
    assert sorted(set(load_record(HOPPER_RECORD)) - checked) == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[ForwardKernel, str]]:
    """The library of ``KERNELS`` and each kernel's compiler output."""
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    result = build_library(KERNELS, 90, cache=cache)
    return result.path, {compiled.kernel: compiled.log for compiled in result.kernels}


@pytest.mark.compile
@pytest.mark.parametrize("kernel", KERNELS, ids=ForwardKernel.short_form)
def test_ptxas_neither_spills_nor_serializes(
    built: tuple[Path, dict[ForwardKernel, str]], kernel: ForwardKernel
) -> None:
    report = parse_ptxas(built[1][kernel])
    assert (report.spill_bytes, report.warnings) == (0, ())


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in CAPPED], ids=ForwardKernel.short_form)
def test_machine_code_passes_the_gates(
    built: tuple[Path, dict[ForwardKernel, str]], kernel: ForwardKernel
) -> None:
    library, logs = built
    assert isinstance(kernel.config, HopperForwardKernelConfig)
    recorded = load_record(HOPPER_RECORD)[kernel.short_form()]
    body = machine_code(library, [kernel])[kernel]
    found = seen(kernel.config, body, recorded, parse_ptxas(logs[kernel]))
    assert violations(kernel.config, found) == []
    lagged = kernel.config.softmax_reference == SoftmaxReference.LAGGED
    assert (len(found.hot) < len(found.loop)) == lagged


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize("kernel", CAPPED, ids=ForwardKernel.short_form)
def test_what_a_capped_kernel_does_not_have_several_times(
    built: tuple[Path, dict[ForwardKernel, str]], kernel: ForwardKernel
) -> None:
    library, logs = built
    assert isinstance(kernel.config, HopperForwardKernelConfig)
    found = seen(kernel.config, machine_code(library, [kernel])[kernel], None, parse_ptxas(logs[kernel]))
    problems = violations(kernel.config, found)
    assert [p for p in problems if not any(several in p for several in IN_SEVERAL_FORMS)] == []
