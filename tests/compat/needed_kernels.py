"""The kernels that calls of attention need on a GPU, found by making them up to where they would run.

Neither the GPU nor its tensors have to be there: calls on CPU tensors ask for the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from unittest import mock

import pytest
from torch import Tensor

from flash_attention.layouts import Layout
from flash_attention.options import Options
from flash_attention.run import eager, gradients, passes
from flash_attention.run.choices import chooser
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.errors import NoKernelError


class _CalledError(Exception):
    """A call has come to its forward pass."""


def needed_kernels(calls: Iterable[Callable[[], object]], facts: DeviceFacts) -> list[Kernel]:
    """The kernels of both passes of the first attention call in each of ``calls``, each kernel once.

    Args:
        calls: what else they raise, they raise again when they run.
        facts: the GPU.
    """
    problems: dict[AttentionProblem, None] = {}

    def note(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        options: Options,
        key: Any = None,
        keep_lse: bool = False,
        traced: Any = None,
    ) -> NoReturn:
        options = options.checked(q)
        problem = passes._checked(q, k, v, layout, options, keep_lse, traced).problem
        problems[problem] = None
        if keep_lse:
            problems[problem.backward(passes.is_deterministic(options))] = None
        raise _CalledError

    with (
        mock.patch.object(eager, "forward_pass", note),
        mock.patch.object(gradients, "forward_pass", note),
    ):
        for call in calls:
            with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
                call()
    kernels: dict[Kernel, None] = {}
    for problem in problems:
        with contextlib.suppress(NoKernelError):
            asked = problem.without_idle_limits()
            choice = chooser("cuda").choice_for(asked, facts, facts.name, None, explained=False)
            kernels[choice.kernel] = None
    return list(kernels)
