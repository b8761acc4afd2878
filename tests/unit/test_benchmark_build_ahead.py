"""What a grid of problems needs is built before the first is measured, all at the same time."""

from __future__ import annotations

import pytest
import torch

import flash_attention
import flash_helpers.build
from flash_attention.backends import cuda
from flash_attention.errors import NoKernelError
from flash_helpers.benchmark.build_ahead import build_ahead_of_grid
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.hopper.backward.choices import CHOICES
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.problem import Problem

CUDA = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list]]:
    """What was to be built: kernels by name, and problems to be prepared."""
    found: list[tuple[str, list]] = []
    monkeypatch.setattr(cuda, "device_facts_of", lambda device: device_facts("H200"))
    monkeypatch.setattr(
        flash_helpers.build, "build_kernels", lambda kernels, targets: found.append(("built", list(kernels)))
    )
    monkeypatch.setattr(
        flash_attention, "prepare", lambda problems, device: found.append(("prepared", list(problems)))
    )
    return found


def problems(direction: str) -> list[Problem]:
    return [
        Problem(DType.BF16, 1, 2, seq_len, 128, causal, direction=direction)
        for seq_len, causal in ((64, False), (512, True))
    ]


def test_gradients_need_a_forward_pass_with_its_lse(asked: list[tuple[str, list]]) -> None:
    configs = [choice.config for choice in CHOICES]
    build_ahead_of_grid(problems(BACKWARD), configs, CUDA, chooses=True)
    (built, kernels), (prepared, wanted) = asked
    assert (built, prepared) == ("built", "prepared")
    assert {kernel.config.d_head for kernel in kernels} == {128}
    assert {kernel.traits.causal for kernel in kernels} == {False, True}
    assert all(isinstance(problem, AttentionProblem) for problem in wanted)
    assert [(p.direction, p.lse) for p in wanted] == [(FORWARD, True)] * 2 + [(BACKWARD, False)] * 2


def test_only_what_runs_is_built(asked: list[tuple[str, list]]) -> None:
    build_ahead_of_grid(problems(FORWARD), [], CUDA, chooses=False)
    assert asked == [("built", [])]
    asked.clear()
    build_ahead_of_grid(problems(FORWARD), [], torch.device("cpu"), chooses=True)
    assert asked == []


def test_what_cannot_be_built_is_left_to_its_row(
    asked: list[tuple[str, list]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(problems: list, device: torch.device) -> None:
        raise NoKernelError("none")

    monkeypatch.setattr(flash_attention, "prepare", refuse)
    build_ahead_of_grid(problems(BACKWARD), [], CUDA, chooses=True)
