"""What a trait adds to the machine code is in kernels that have it, and in no others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from flash_helpers.build import KernelCache, build_library
from flash_helpers.build.sass import Instruction, disassemble, find_tool, parse_functions
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel, ForwardTraits

pytestmark = pytest.mark.compile

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, True, True, True, 0, 2, 2, False, True)
TRAITS = (
    ForwardTraits(),
    ForwardTraits(window=True),
    ForwardTraits(softcap=True),
    ForwardTraits(sinks=True, varlen=True),
    ForwardTraits(split=True),
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[ForwardTraits, list[Instruction]]:
    """The machine code of the main kernel of each of ``TRAITS`` for sm_80."""
    if find_tool("cuobjdump") is None:
        pytest.skip("no cuobjdump: pip install -r requirements/cuda-compiler.txt")
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    result = build_library([ForwardKernel(CONFIG, traits) for traits in TRAITS], 80, cache=cache)
    assert all(compiled.spill_bytes == 0 for compiled in result.kernels)
    functions = parse_functions(disassemble(Path(result.path)))
    return {traits: body for traits in TRAITS for name, body in functions.items() if _is_of(name, traits)}


def _is_of(mangled: str, traits: ForwardTraits) -> bool:
    """Whether a mangled kernel name has these traits; those behind the last that is on are left out."""
    match = re.search(r"flash_forward_kernel.*13ForwardTraits((?:Lb[01]E)*)E", mangled)
    if match is None:
        return False
    given = [flag == "1" for flag in re.findall(r"Lb([01])E", match[1])]
    wanted = list(vars(traits).values())
    return given + [False] * (len(wanted) - len(given)) == wanted


def matrix_loops(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Loops with matrix instructions."""
    loops = (
        [i for i in body if branch.target <= i.address <= branch.address]
        for branch in body
        if branch.target is not None and branch.target < branch.address
    )
    return [loop for loop in loops if any(i.name == "HMMA" for i in loop)]


def count(body: Sequence[Instruction], *opcodes: str) -> int:
    """Instructions that are one of ``opcodes``, with any or with the given modifiers."""
    return sum(f"{i.opcode}.".startswith(tuple(f"{opcode}." for opcode in opcodes)) for i in body)


def test_a_plain_kernel_has_nothing_of_the_traits(code: dict[ForwardTraits, list[Instruction]]) -> None:
    plain = code[ForwardTraits()]
    loops = matrix_loops(plain)
    assert len(loops) == 2, "the blocks with a mask and those without"
    assert sum(count(loop, "MUFU.RCP") for loop in loops) == 0, "reciprocals belong to the soft cap"
    assert count(plain, "LDG", "LD") == 0, "lengths and sinks are read by kernels that have them"
    assert count(plain, "STG.E.64") == 0, "partial outputs are of kernels with split keys"


def test_kernels_with_a_trait_have_what_it_takes(code: dict[ForwardTraits, list[Instruction]]) -> None:
    assert len(matrix_loops(code[ForwardTraits(window=True)])) == 3, "and the window's left edge"
    for loop in matrix_loops(code[ForwardTraits(softcap=True)]):
        # 64 x 32 scores on 128 threads
        assert count(loop, "MUFU.RCP") == 16
    assert count(code[ForwardTraits(sinks=True, varlen=True)], "LDG") > 0
    assert count(code[ForwardTraits(split=True)], "STG.E.64") > 0
