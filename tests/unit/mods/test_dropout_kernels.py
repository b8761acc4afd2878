"""Dropout as a part of the mod that kernels are compiled with: what a launch is told, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flash_attention
from flash_attention.call import Dropout
from flash_attention.mods.arguments import mod_arguments
from flash_attention.mods.tracing import trace
from flash_helpers import build
from flash_helpers.build import KernelCache
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.mods.backward import backward_mod
from flash_helpers.mods.cpp import cpp_source
from flash_helpers.mods.dropped import NOTHING, dropped
from flash_helpers.mods.mod import Dropped, Element, Number
from flash_helpers.select.candidates import kernel_for, unable_reason

TABLE = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))


def scaled(s, b, h, q, k):
    return s * TABLE[h, k % 20] + 0.5


def problem(dtype=DType.BF16, d=64, **features) -> AttentionProblem:
    return AttentionProblem(dtype, 2, 4096, 4096, 16, 16, d, d, lse=True, dropout=True, **features)


# ---------------------------------------------------------------------- the mod
def test_probability_and_seed_are_the_last_ones() -> None:
    traced = trace(scaled)
    seed = torch.tensor(3)
    asked = problem(mod=traced.mod, softcap=True)
    mod = asked.compiled_mod
    assert mod is not None
    assert mod.dropped == Dropped(len(mod.numbers) - 1, 1)
    assert mod.numbers[-2:] == (Number.REAL, Number.REAL)  # the soft cap before it
    assert [x.element for x in mod.tensors] == [Element.FP32, Element.INT64]
    given = mod_arguments(traced, 30.0, dropout=Dropout(0.25, seed))
    assert given.numbers[-2:] == (30.0, 0.25)
    assert given.tensors[-1] == (seed.data_ptr(), (), ())
    assert [len(given.numbers), len(given.tensors)] == [len(mod.numbers), len(mod.tensors)]

    gradients = asked.backward(False, (0,)).compiled_mod
    assert gradients is not None
    assert gradients.dropped == mod.dropped
    assert gradients == backward_mod(mod, (0,))
    assert [x.element for x in gradients.tensors[1:]] == [Element.INT64, Element.INT64, Element.INT32]
    sums = torch.zeros(16, 20, dtype=torch.int64)
    given = mod_arguments(traced, 30.0, dropout=Dropout(0.25, seed), sums=(sums,))
    assert given.tensors[1:] == ((seed.data_ptr(), (), ()), (sums.data_ptr(), (20, 1), (16, 20)))


def test_dropout_alone_is_a_mod() -> None:
    asked = problem()
    assert asked.mod is None
    assert asked.compiled_mod == dropped(NOTHING) == asked.backward().compiled_mod
    assert str(asked.compiled_mod) == "weight = 0 where random(t0, b, h, q, k) < n0, else weight / (1 - n0)"
    text = cpp_source(dropped(NOTHING))
    assert "kDrops = true" in text
    assert "flash::make_dropout(given.numbers[0].real, given.tensors[0].data)" in text
    assert "kDrops = false" in cpp_source(trace(scaled).mod)
    assert not problem(softcap=True).features()["softcap"]  # it is a part of the mod


def test_mods_differ_by_dropout_alone() -> None:
    mod = trace(scaled).mod
    kinds = [mod, dropped(mod), NOTHING, dropped(NOTHING)]
    assert len({x.digest for x in kinds}) == len(set(kinds)) == 4
    assert dropped(mod).results == mod.results


def test_the_choice_says_it() -> None:
    q = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    assert "random(" in str(flash_attention.explain_choice(q, q, q, dropout_p=0.1))
    assert "random(" not in str(flash_attention.explain_choice(q, q, q))


def test_rows_that_are_dropped_are_summed_before() -> None:
    for direction in directions(FORWARD):
        for each in direction.candidates():
            if not each.writes_lse:
                asked = problem(each.dtype, each.d_head)
                reason = unable_reason(each, asked, [each])
                assert reason is not None


# ---------------------------------------------------------------------- kernels
def default(asked: AttentionProblem, family: str, device: str) -> Kernel:
    (direction,) = (d for d in directions(asked.direction) if d.family.name == family)
    defaults = direction.defaults(asked, device_facts(device))
    assert defaults is not None
    return kernel_for(defaults.whole[0], asked)


@pytest.mark.compile
@pytest.mark.parametrize(("family", "device", "target"), [("ampere", "A100", 80), ("hopper", "H100", 90)])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_kernels_with_dropout_spill_nothing(
    tmp_path: Path, direction: str, family: str, device: str, target: int
) -> None:
    asked = [problem(dtype, d) for d, dtype in ((64, DType.BF16), (128, DType.FP16), (256, DType.BF16))]
    asked.append(problem(mod=trace(scaled).mod))
    if direction == BACKWARD:
        asked = [x.backward() for x in asked]
    kernels = [default(x, family, device) for x in asked]
    built = build.build_library(kernels, target, cache=KernelCache(tmp_path)).kernels
    assert len(built) == len(kernels)
    for one in built:
        assert not one.warnings  # C75xx: products that wait for each other
        # As many as without dropout: the function's own values beside P twice and dP.
        most = 32 if one.kernel == kernels[-1] and (family, direction) == ("hopper", BACKWARD) else 0
        assert one.spill_bytes <= most, one.kernel.short_form()
