"""What calls of attention ask for, found by making them and stopping where a kernel is chosen."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from unittest import mock

import flash_attention
from flash_attention.run import choices, passes
from flash_helpers.kernels.problem import AttentionProblem


class _AskedError(Exception):
    pass


def asked_problems(call: Callable[[], object]) -> list[AttentionProblem]:
    """The problems of a call, of which nothing is computed: that of its output, and of the gradients that it
    records."""
    found: list[AttentionProblem] = []

    def choose(problem: AttentionProblem, *_: Any) -> NoReturn:
        found.append(problem)
        raise _AskedError

    def choose_with_gradients(*given: Any) -> NoReturn:
        asked = inspect.signature(choices.choose_with_gradients).bind(*given)
        asked.apply_defaults()
        problem, told = asked.arguments["problem"], asked.arguments
        found.extend((problem, problem.backward(told["deterministic"], told["captured_gradients"])))
        raise _AskedError

    with (
        mock.patch.object(passes, "choose", choose),
        mock.patch.object(passes, "choose_with_gradients", choose_with_gradients),
        contextlib.suppress(_AskedError),
    ):
        call()
    return found


def build_all(calls: Iterable[Callable[[], object]], device: str) -> str:
    """Builds what all calls need, in parallel.

    Returns:
        what went wrong, in a line; the calls raise it again.
    """
    problems: list[AttentionProblem] = []
    for call in calls:
        with contextlib.suppress(Exception):  # the call itself raises it again
            problems += asked_problems(call)
    try:
        flash_attention.prepare(list(dict.fromkeys(problems)), device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
