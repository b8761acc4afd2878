"""Gradients of every head size with every trait, where all memory that nobody has written is NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
import unwritten
from gradient_calls import Call, Case, problem_of_case

from flash_helpers.kernel_configs import KNOWN_DEVICES, BackwardKernel, DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.select.candidates import kernel_for
from flash_helpers.test.gradients import run_gradients

HEAD_SIZES = (
    (8, 8), (40, 72), (64, 64), (96, 96), (128, 104), (136, 136), (192, 128), (192, 192), (200, 200),
    (248, 248), (256, 16), (256, 256),
)  # fmt: skip
CASES = {
    "plain": {},
    "causal": {"options": {"causal": True}, "dlse": True},
    "window": {"options": {"window": (40, 9)}},
    "soft cap": {"options": {"softcap": 3.0}, "dlse": True},
    "packed": {"q": (100, 1, 0, 90), "k": (60, 200, 30, 90), "options": {"causal": True}},
    "everything": {
        "q": (150, 31, 64), "k": (90, 131, 64), "sinks": True, "dlse": True,
        "options": {"window": (50, None), "causal": True, "softcap": 2.0},
    },
}  # fmt: skip


def _kernels() -> list[object]:
    """What each family runs on an H200 for each case, in turn in either type."""
    found = []
    for number, (name, d) in enumerate(itertools.product(CASES, HEAD_SIZES)):
        case, dtype = Case(d=d, **{"q": 70, "k": 130, **CASES[name]}), list(DType)[number % 2]
        problem = problem_of_case(case, dtype, d)
        for direction in directions(BACKWARD):
            if (answer := direction.defaults(problem, KNOWN_DEVICES["H200"])) is not None:
                kernel = kernel_for(answer.whole[0], problem)
                found.append(pytest.param(case, kernel, id=f"{name}-{d[0]}/{d[1]}-{kernel.short_form()}"))
    return found


@pytest.mark.parametrize("size", [512, 100_000, 1 << 20, 5 << 20, 40 << 20])
def test_unwritten_memory_is_nan(size: int) -> None:
    unwritten.fill_with_nan()
    assert (torch.empty(size, dtype=torch.uint8, device="cuda") == 255).all()


def test_unwritten_shared_memory_is_nan() -> None:
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    x @ x  # leaves its tiles there
    unwritten.fill_with_nan()
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert unwritten.words_of_shared_memory_that_are_not_nan() < 256 * n_sms


@pytest.mark.parametrize(("case", "kernel"), _kernels())
def test_gradients_read_nothing_that_was_not_written(case: Case, kernel: BackwardKernel) -> None:
    from flash_attention.backends.cuda import device_facts_of

    if reason := kernel.infeasible_reason(device_facts_of()):
        pytest.skip(reason)
    call = Call(case, kernel.config.dtype, case.d)
    call.check(run_gradients(call.backward(), kernel.config))
