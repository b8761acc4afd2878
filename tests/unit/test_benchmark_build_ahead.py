"""What a benchmark measures is built before, at once, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from flash_attention.backends import cuda
from flash_helpers import build
from flash_helpers.benchmark.build_ahead import build_for
from flash_helpers.benchmark.gradients import BackwardImplementation, BackwardKernelImplementation
from flash_helpers.benchmark.implementations import AttentionImplementation, KernelImplementation
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import direction_of, directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.problem import Problem

FORWARD_PROBLEM = Problem(DType.FP16, 1, 4, 512, 128)
BACKWARD_PROBLEM = Problem(DType.FP16, 1, 4, 512, 128, direction=BACKWARD)
GPU = torch.device("cuda", 0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[list]:
    """What each call of the builder was asked for, on an H200 that is not there."""
    calls: list[list] = []
    monkeypatch.setattr(cuda, "device_facts_of", lambda device: device_facts("H200"))
    monkeypatch.setattr(cuda, "build_obstacle", lambda: None)
    monkeypatch.setattr(
        cuda, "load_kernel", lambda kernel, target: any(kernel in call for call in calls) or None
    )
    monkeypatch.setattr(build, "build_kernels", lambda kernels, targets: calls.append(list(kernels)))
    return calls


def test_all_choices_are_built_in_one_go(built: list[list]) -> None:
    longer = Problem(DType.BF16, 1, 4, 8192, 64, causal=True)
    everyone = [AttentionImplementation(), *select_peers("all")]
    missing = build_for([(FORWARD_PROBLEM, everyone), (longer, everyone)], GPU)
    assert built == [missing]
    assert {(k.config.dtype, k.config.d_head, k.traits.causal) for k in missing} == {
        (DType.FP16, 128, False),
        (DType.BF16, 64, True),
    }
    assert build_for([(FORWARD_PROBLEM, everyone)], GPU) == []  # what is there is not built again
    assert len(built) == 1


def test_gradients_bring_the_forward_kernel_that_leaves_an_lse(built: list[list]) -> None:
    build_for([(BACKWARD_PROBLEM, [BackwardImplementation()])], GPU)
    ((*kernels,),) = built
    assert [direction_of(kernel).name for kernel in kernels] == [BACKWARD, "forward"]
    assert kernels[1].config.writes_lse


def test_named_kernels_are_built_for_the_problems_that_they_fit(built: list[list]) -> None:
    hopper = next(
        k
        for d in directions(BACKWARD)
        for k in d.built()
        if k.config.d_head == 128 and k.config.dtype is DType.FP16
    )
    forward = next(k for k in directions("forward")[0].built() if k.config.d_head == 64)
    named = [BackwardKernelImplementation(hopper), KernelImplementation(forward)]
    build_for([(BACKWARD_PROBLEM, named)], GPU)
    assert hopper in built[0]
    assert forward not in built[0]


def test_what_cannot_be_built_is_left_to_the_row(built: list[list], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernels: list, targets: list) -> None:
        raise OSError("no room on the disk")

    monkeypatch.setattr(build, "build_kernels", refuse)
    assert build_for([(FORWARD_PROBLEM, [AttentionImplementation()])], GPU)
    monkeypatch.setattr(cuda, "build_obstacle", lambda: "no compiler")
    monkeypatch.setattr(build, "build_kernels", lambda *_: pytest.fail("there is no compiler"))
    assert build_for([(FORWARD_PROBLEM, [AttentionImplementation()])], GPU)


def test_nothing_is_built_for_the_cpu(built: list[list]) -> None:
    assert build_for([(FORWARD_PROBLEM, [AttentionImplementation()])], torch.device("cpu")) == []
    assert built == []
