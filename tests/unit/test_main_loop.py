"""Natural loops in machine code, against graphs whose loops are known by hand."""

from __future__ import annotations

from flash_helpers.build.control_flow import ControlFlow
from flash_helpers.build.main_loop import main_loop
from flash_helpers.build.sass import Instruction, count_classes, parse_functions


def code(*lines: str) -> list[Instruction]:
    """Instructions 16 bytes apart, read as cuobjdump prints them."""
    text = "".join(f"        /*{16 * n:04x}*/    {line} ;\n" for n, line in enumerate(lines))
    return parse_functions(f"\t\tFunction : k\n{text}")["k"]


def loops(*lines: str) -> list[tuple[int, list[int]]]:
    """(header, all instructions) of each natural loop, as numbers of lines."""
    flow = ControlFlow(code(*lines))
    return [
        (flow.blocks[loop.header][0].address // 16, [i.address // 16 for i in flow.instructions(loop.blocks)])
        for loop in flow.natural_loops()
    ]


def test_nested_loops() -> None:
    assert loops("MOV", "FADD", "FMUL", "@P0 BRA 0x20", "@P1 BRA 0x10", "EXIT") == [
        (1, [1, 2, 3, 4]),
        (2, [2, 3]),
    ]


def test_a_branch_back_to_what_does_not_dominate_it_closes_no_loop() -> None:
    # 3 is reached around 1; so the branch from 4 back to 1 may be taken without 1 before it.
    assert loops("@P0 BRA 0x30", "FADD", "@P1 EXIT", "FMUL", "@P2 BRA 0x10", "EXIT") == []


def test_an_unconditional_branch_has_one_way_on() -> None:
    # Line 1 jumps over 2, which nothing reaches: its branch back to 0 closes no loop.
    assert loops("FADD", "BRA 0x30", "BRA 0x0", "EXIT") == []
    assert loops("FADD", "@P0 BRA 0x30", "BRA 0x0", "EXIT") == [(0, [0, 1, 2])]
    assert loops("FADD", "BRA.DIV UR4, 0x30", "BRA 0x0", "EXIT") == [(0, [0, 1, 2])]
    assert loops("FADD", "EXIT", "BRA 0x0") == []
    assert loops("FADD", "@P0 EXIT", "BRA 0x0") == [(0, [0, 1, 2])]


RETRY_AT_THE_END = (
    "MOV",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",  # 1: the loop over tiles begins
    "@!P0 BRA 0xb0",  # 2: not there yet: to the retry at the end
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]",  # 3
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]",
    "MUFU.EX2 R3, R3",
    "@P1 BRA 0x10",  # 6: the loop ends
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]",  # 7: the next item's first product
    "UTMALDG.4D [UR8], [UR4]",
    "MUFU.EX2 R3, R3",
    "EXIT",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",  # 11: tried again until it is there
    "@!P0 BRA 0xb0",
    "BRA 0x30",  # 13: back into the loop, far up
)


def test_a_cold_retry_that_jumps_back_is_no_loop_of_its_own() -> None:
    """Read as a range of addresses, 3 to 13 would be a loop with 3 products and a bulk copy."""
    assert [header for header, _ in loops(*RETRY_AT_THE_END)] == [1, 11]
    for n_products in (None, 2):
        loop = main_loop(code(*RETRY_AT_THE_END), n_products)
        assert [i.address // 16 for i in loop] == [1, 2, 3, 4, 5, 6], "without the retry, which is cold"
    assert count_classes(loop) == {
        "HGMMA": 2, "MUFU": 1, "MUFU.EX2": 1, "barrier": 1, "other": 2, "total": 6
    }  # fmt: skip
    assert main_loop(code(*RETRY_AT_THE_END), 3) == []


def test_a_wait_beside_work_stays_in_the_loop() -> None:
    """As on sm_80: new tiles are loaded, after a wait, while there are some."""
    loop = main_loop(
        code(
            "HMMA.16816.F32 R4, R8, R10, R4",  # 0
            "@P0 BRA 0x50",  # 1: nothing to load
            "LDS R3, [R4]",  # 2: wait
            "@P1 BRA 0x20",
            "LDGSTS.E.BYPASS.128 [R5], [R6.64]",  # 4
            "@P2 BRA 0x0",  # 5
            "EXIT",
        )
    )
    assert [i.address // 16 for i in loop] == [0, 1, 2, 3, 4, 5]
