"""Threads whose first work on the device is a call of this library: autograd's own are such threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from gradient_calls import Call, Case

from flash_attention import forward
from flash_helpers.kernel_configs import DType, choose_hopper_kernel
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.select.candidates import kernel_for
from flash_helpers.test.gradients import run_gradients

CONFIGS = [
    min((kernel.config for kernel in direction.built() if own is kernel.config.deterministic), key=str)
    for direction in directions(BACKWARD)
    for own in (False, True)
]


def in_a_new_thread(call: Callable[[], None]) -> None:
    """Runs it there, and raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
            torch.cuda.synchronize()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_forward() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")
    config = choose_hopper_kernel(DType.BF16, 128, False, 512)[0].config
    q = torch.randn(2, 512, 2, 128, device="cuda", dtype=torch.bfloat16)
    expected = forward(config, q, q, q).clone()
    # Other tensors, of which no map is remembered, all allocated here.
    x, out = q.clone(), torch.empty_like(q)
    in_a_new_thread(lambda: forward(config, x, x, x, out))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.short_form())
def test_gradients(config) -> None:
    from flash_attention.backends.cuda import device_facts_of

    if reason := config.infeasible_reason(device_facts_of()):
        pytest.skip(reason)
    case = Case(q=128, k=128)
    call = Call(case, config.dtype, (config.d_head, config.d_head_v))
    assert kernel_for(config, call.backward().problem).malformed_reason() is None
    run_gradients(call.backward(), config)  # builds, and leaves memory for workspaces in PyTorch's allocator
    backward, found = call.backward(), {}
    in_a_new_thread(lambda: found.update(run_gradients(backward, config)))
    call.check(found)
