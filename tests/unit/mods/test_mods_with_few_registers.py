"""A mod that its kernel lacks registers for runs in one of which a thread holds less, by a stated rule."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gallery import causal

from flash_attention.mods.tracing import trace
from flash_attention.run import availability
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.select import select

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def chosen():
    mod = trace(None, causal).mod
    problem = AttentionProblem(DType.BF16, 2, 4096, 4096, 16, 16, 128, 128, mod=mod)
    return select(problem, device_facts("H200"), explained=False)


def narrower(kernel, n):
    for _ in range(n):
        config = direction_of(kernel).relieved(kernel.config)
        assert config is not None
        kernel = replace(kernel, config=config)
    return kernel


@pytest.mark.parametrize(
    ("spills", "taken"),
    [((0,), 0), ((256,), 0), ((900, 0), 1), ((900, 300, 20), 2), ((900, 300, 400), 1), ((300, 900, 900), 0)],
)
def test_the_first_that_spills_little_runs(monkeypatch, chosen, spills, taken) -> None:
    kernels = [narrower(chosen.kernel, n) for n in range(len(spills))]
    told, compiled = dict(zip(kernels, spills, strict=True)), []
    backend = SimpleNamespace(
        spill_bytes=lambda kernel, device: told[kernel],
        get_kernel=lambda kernel, device: compiled.append(kernel),
    )
    monkeypatch.setattr(availability, "backend", lambda name: backend)
    found = availability._with_registers(chosen, DEVICE, build=True)
    assert found.kernel == kernels[taken]
    assert found.kernel.mod == chosen.kernel.mod
    assert compiled == kernels[1:]
    assert ("spills" in found.reason) is (spills[0] > availability.TOLERATED_SPILLS)


def test_a_kernel_without_a_mod_stays(monkeypatch, chosen) -> None:
    monkeypatch.setattr(availability, "backend", lambda name: SimpleNamespace(spill_bytes=None))
    plain = replace(chosen, kernel=replace(chosen.kernel, mod=None))
    assert availability._with_registers(plain, DEVICE, build=True) is plain
