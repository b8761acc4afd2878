"""Reading machine code as cuobjdump and nvdisasm print it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_helpers.build.main_loop import main_loop
from flash_helpers.build.sass import (
    Instruction,
    count_classes,
    disassemble,
    find_tool,
    parse_functions,
)

CUOBJDUMP = """
	code for sm_80
		Function : _Z6kernelv
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                    /* 0x00000a0000017a02 */
                                                                             /* 0x000fe40000000f00 */
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;          /* 0x0000000a0804723c */
        /*0020*/              @!P0 BRA 0x20 ;                                /* 0x0000001000008947 */
        /*0030*/                   LDSM.16.M88.4 R4, [R2] ;                  /* 0x000000000204783b */
        /*0040*/                   HMMA.16816.F32 R4, R8, R10, R4 ;          /* 0x0000000a0804723c */
        /*0050*/                   MUFU.EX2 R3, R3 ;                         /* 0x0000000300037308 */
        /*0060*/                   MUFU.RCP R3, R3 ;                         /* 0x0000000300037308 */
        /*0070*/                   LDGSTS.E.BYPASS.128 [R5], [R6.64] ;       /* 0x0000000006057fae */
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;             /* 0x0000000000007b1d */
        /*0090*/               @P1 BRA 0x30 ;                                /* 0xffffffa000008947 */
        /*00a0*/                   HMMA.16816.F32 R4, R8, R10, R4 ;          /* 0x0000000a0804723c */
        /*00b0*/               @P2 BRA 0x10 ;                                /* 0xffffffa000008947 */
        /*00c0*/                   EXIT ;                                    /* 0x000000000000794d */
        /*00d0*/                   BRA 0xd0;                                 /* 0xfffffff000007947 */
		Function : _Z5otherv
        /*0000*/                   EXIT ;                                    /* 0x000000000000794d */
"""

NVDISASM = """
.text._Z6kernelv:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   SHFL.BFLY PT, R2, R3, 0x1, 0x1f ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   EXIT ;
"""


def test_main_loop_is_the_innermost_with_matrix_instructions() -> None:
    functions = parse_functions(CUOBJDUMP)
    assert list(functions) == ["_Z6kernelv", "_Z5otherv"]
    loop = main_loop(functions["_Z6kernelv"])
    assert (loop[0].address, loop[-1].address) == (0x30, 0x90)
    assert main_loop(functions["_Z5otherv"]) == []


def test_classes_of_the_main_loop() -> None:
    counts = count_classes(main_loop(parse_functions(CUOBJDUMP)["_Z6kernelv"]))
    assert counts == {
        "HMMA": 1, "LDSM": 1, "LDGSTS": 1, "MUFU": 2, "MUFU.EX2": 1, "barrier": 1, "other": 1, "total": 7,
    }  # fmt: skip


def test_labels_of_nvdisasm_are_resolved() -> None:
    body = parse_functions(NVDISASM)["_Z6kernelv"]
    assert [i.target for i in body if i.name == "BRA"] == [0x50, 0x20]
    assert count_classes(main_loop(body)) == {"HGMMA": 1, "shuffle": 1, "other": 1, "total": 3}


def test_counts_add_up() -> None:
    body = parse_functions(CUOBJDUMP)["_Z6kernelv"]
    counts = count_classes(body)
    apart = ("total", "MUFU.EX2")
    assert sum(n for name, n in counts.items() if name not in apart) == counts["total"] == len(body) == 14


def test_predicates_and_modifiers_are_stripped() -> None:
    branch = parse_functions(CUOBJDUMP)["_Z6kernelv"][9]
    assert branch == Instruction(0x90, "BRA", 0x30)


def test_a_tool_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho nothing to see >&2\nexit 1\n")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool("cuobjdump") is None or find_tool("cuobjdump") != tool  # not executable yet
    tool.chmod(0o755)
    assert find_tool("cuobjdump") == tool
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ValueError, match="nothing to see"):
        disassemble(tmp_path / "kernel.so")


def test_the_main_loop_of_a_warpgroup_kernel_is_the_one_with_its_softmax() -> None:
    """As in the Hopper family: a rare path with HMMA, a product of the next item alone, the main loop."""
    text = "\t\tFunction : k\n" + "".join(
        f"        /*{16 * n:04x}*/    {line} ;\n"
        for n, line in enumerate(
            [
                "HMMA.16816.F32 R4, R8, R10, R4", "MUFU.EX2 R3, R3", "@P0 BRA 0x0",
                "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]", "@P0 BRA 0x30",
                "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]", "FADD R1, R1, R2", "MUFU.EX2 R3, R3",
                "@P0 BRA 0x50",
            ]
        )
    )  # fmt: skip
    loop = main_loop(parse_functions(text)["k"])
    assert (loop[0].address, loop[-1].address) == (0x50, 0x80)
