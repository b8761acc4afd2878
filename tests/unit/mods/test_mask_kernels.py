"""Hopper kernels with a mask of the user's: bits of tiles for warpgroups, and what runs beside products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attention.backends.cuda_tiles import KINDS_A_WORD, tiles_a_word
from flash_attention.mods.tracing import trace
from flash_attention.run.availability import TOLERATED_SPILLS
from flash_helpers import build
from flash_helpers.build import KernelCache
from flash_helpers.build.sass import Instruction, disassemble, parse_functions
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.mods.mod import Mod
from flash_helpers.select.candidates import kernel_for

DOCUMENT = torch.arange(4096) // 300
MASKS = {
    "documents": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "prefix": lambda b, h, q, k: (k < 1000) | (q >= k),
}
CAUSAL_DOCUMENTS = lambda b, h, q, k: (q >= k) & (DOCUMENT[q] == DOCUMENT[k])  # noqa: E731
BIASED = (lambda s, b, h, q, k: s + 0.1 * k, MASKS["prefix"])


def chosen(
    family: str, direction: str, d: int, mod: Mod | None, deterministic: bool = False
) -> tuple[Kernel, str]:
    """What a family runs, and why."""
    problem = AttentionProblem(DType.BF16, 4, 4096, 4096, 16, 16, d, d, mod=mod)
    if direction == BACKWARD:
        problem = problem.backward(deterministic)
    found = next(x for x in directions(direction) if x.family.name == family)
    defaults = found.defaults(problem, device_facts("H200"))
    assert defaults is not None
    return kernel_for(defaults.whole[0], problem), defaults.whole[1]


def test_a_word_holds_the_kinds_of_whole_tiles() -> None:
    """As ``TilesOfWord`` in mod_tiles.cuh, where three groups take the room of four."""
    assert [tiles_a_word(groups) for groups in (1, 2, 3, 4)] == [16, 8, 4, 4]
    assert KINDS_A_WORD == 16
    mod = trace(None, MASKS["documents"]).mod
    groups = {d: chosen("hopper", FORWARD, d, mod)[0].config.mask_groups for d in (64, 128, 256)}
    assert groups == {64: 4, 128: 2, 256: 2}
    assert chosen("ampere", FORWARD, 128, mod)[0].config.mask_groups == 1


@pytest.mark.parametrize("d", [64, 128])
def test_a_mask_makes_items_uneven(d: int) -> None:
    plain, _ = chosen("hopper", BACKWARD, d, None)
    assert not plain.config.head_sections
    masked, reason = chosen("hopper", BACKWARD, d, trace(None, MASKS["prefix"]).mod)
    assert masked.config == replace(plain.config, head_sections=True)
    assert "hides keys" in reason
    scored, reason = chosen("hopper", BACKWARD, d, trace(BIASED[0], None).mod)
    assert scored.config == plain.config
    assert "hides keys" not in reason


@pytest.mark.compile
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_kernels_with_a_mask_spill_nothing(tmp_path: Path, direction: str, d: int, name: str) -> None:
    kernel, _ = chosen("hopper", direction, d, trace(None, MASKS[name]).mod)
    (built,) = build.build_library([kernel], 90, cache=KernelCache(tmp_path)).kernels
    assert not built.warnings  # C75xx: products that wait for each other
    assert built.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(
    "mask", [MASKS["documents"], CAUSAL_DOCUMENTS], ids=["documents", "causal documents"]
)
@pytest.mark.parametrize("d", [64, 128])
def test_kernels_that_repeat_their_bits_compile_with_a_mask(tmp_path: Path, d: int, mask) -> None:
    """The kernel of dQ had more predicates than there are (ptxas: C7600)."""
    kernel, _ = chosen("hopper", BACKWARD, d, trace(None, mask).mod, deterministic=True)
    (built,) = build.build_library([kernel], 90, cache=KernelCache(tmp_path)).kernels
    assert not built.warnings
    assert built.spill_bytes <= TOLERATED_SPILLS


def beside_products(body: list[Instruction]) -> list[list[str]]:
    """Opcodes between a product and the next wait for products, of each stretch without a branch back."""
    found: list[list[str]] = []
    running = False
    for one in body:
        if one.opcode.startswith("HGMMA"):
            if not running:
                found.append([])
            running = True
        elif one.opcode.startswith("WARPGROUP.DEPBAR"):
            running = False
        elif running:
            found[-1].append(one.opcode)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("d", [64, 128])
def test_no_mask_is_evaluated_beside_products_of_a_backward_kernel(tmp_path: Path, d: int) -> None:
    """What runs beside them is as without functions: it loads nothing from global memory."""
    kernel, _ = chosen("hopper", BACKWARD, d, trace(None, MASKS["documents"]).mod)
    built = build.build_library([kernel], 90, cache=KernelCache(tmp_path))
    functions = parse_functions(disassemble(built.path))
    (body,) = [code for name, code in functions.items() if "hopper_backward_mod_kernel" in name and code]
    stretches = beside_products(body)
    assert len(stretches) >= 3
    assert any("MUFU.EX2" in stretch for stretch in stretches)
    assert not [stretch for stretch in stretches if any(code.startswith("LDG") for code in stretch)]
    assert any(one.opcode.startswith("LDG") for one in body)  # the mask is there
