"""Runs other libraries' own tests on this library: the path of a test file is the argument.

    python tests/compat/run_flash_attn_tests.py .../flash_attn-2.8.3/tests/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --library flash_attn_3 .../hopper/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --library vllm .../tests/kernels/attention/test_flash_attn.py

The file comes with the sources of the library (of flash-attn 2, PyPI's source distribution has it) and is run
as it is, with its own inputs, references and tolerances. The names that it imports are this library's there
(``libraries.py``). What is done to it while it runs:

- Without ``--gradients`` gradients are off, and ``torch.autograd.grad`` gives zeros. What the tests assert of
  gradients then compares zero with zero and says nothing; what they assert of outputs is untouched. Functions
  that test nothing but gradients are left out, by name. With ``--gradients`` all is run as it stands, and
  kernels are compiled when a case first needs them.
- Each function runs a sample of its grid, the same in every run. Cases that need what the library refuses are
  counted by argument, and of each argument a few are run, which must raise ``NotImplementedError`` naming it.
- On a GPU the kernels that the sample needs are compiled first, in parallel.

The exit status is 1 when a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from libraries import LIBRARIES, Library
from parameter_grid import Case, Sample, sample
from torch.overrides import TorchFunctionMode

from flash_attention.backends import backend
from flash_helpers.build import build_kernels
from flash_helpers.kernels.kernel import ForwardKernel


# ---------------------------------------------------------------------- loading
class CudaMeansCpu(TorchFunctionMode):
    """Takes the tests' ``device="cuda"`` as the CPU, to try the runner where no GPU is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def surroundings(device: str, gradients: bool) -> Iterator[None]:
    """What is around the tests: no gradients unless asked for, and on the CPU a GPU that is not there."""

    def zeros(outputs: Any, inputs: Any, *unused: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.zeros_like, inputs if isinstance(inputs, (tuple, list)) else (inputs,)))

    with contextlib.ExitStack() as stack:
        if not gradients:
            stack.enter_context(torch.no_grad())
            stack.enter_context(mock.patch("torch.autograd.grad", zeros))
        if device == "cpu":
            stack.enter_context(CudaMeansCpu())
            stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
            properties = mock.Mock(total_memory=80 * 2**30)
            stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=properties))
        yield


def load(path: Path, library: Library) -> ModuleType:
    """Imports the test file, with the names of its library being this one's."""
    library.install(path)
    spec = importlib.util.spec_from_file_location("flash_attn_tests", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library.prepare(module)
    return module


def samples(
    module: ModuleType,
    library: Library,
    n_cases: int,
    n_refused: int,
    longest: int,
    left_out: tuple[str, ...],
) -> list[Sample]:
    """What is run of the file's test functions, in its order.

    Args:
        left_out: functions that are not.
    """

    def short(case: Case) -> bool:
        return library.wanted(case) and all(
            n <= longest for name, n in case.items() if name.startswith("seqlen") and type(n) is int
        )

    found = []
    for name, function in vars(module).items():
        if name.startswith("test_") and callable(function) and name not in left_out:
            rules = {**library.outside, **library.outside_in.get(name, {})}

            def outside(case: Case, rules: dict[str, Any] = rules) -> str | None:
                hits = (rules[p] for p in case if p in rules and rules[p][1](case[p]))
                return next((argument for argument, _ in hits), None)

            found.append(sample(name, function, n_cases, n_refused, outside, short))
    return found


# ---------------------------------------------------------------------- kernels
class KernelWantedError(Exception):
    """A case has come to its launch."""


def needed_kernels(found: list[Sample]) -> list[ForwardKernel]:
    """Runs every case up to its launch and notes the kernel."""
    kernels: dict[ForwardKernel, None] = {}

    def note(kernel: ForwardKernel, device: object = None) -> None:
        kernels[kernel] = None
        raise KernelWantedError

    with mock.patch.object(backend("cuda"), "get_kernel", note):
        for one in found:
            for case in one.cases:
                # Anything else that is raised is raised again when the case runs.
                with contextlib.suppress(Exception, pytest.skip.Exception):
                    one.function(**case)
    return list(kernels)


# ---------------------------------------------------------------------- running
@dataclass
class Outcome:
    """What became of one function's cases."""

    passed: int = 0
    skipped: int = 0
    not_run: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(one: Sample, end: float) -> Outcome:
    """Runs the cases of a function until ``time.perf_counter()`` is ``end``."""
    outcome = Outcome()
    for argument, case in one.refused:
        _run_refused(one, argument, case, outcome)
    for i, case in enumerate(one.cases):
        if time.perf_counter() > end:
            outcome.not_run = len(one.cases) - i
            break
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                one.function(**case)
            outcome.passed += 1
        except pytest.skip.Exception:
            outcome.skipped += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} at {where.name}: {where.line}"
            lines = (f"{one.name}({_text(case)})", what, *printed.getvalue().splitlines())
            outcome.failures.append("\n  ".join(lines))
    return outcome


def _run_refused(one: Sample, argument: str, case: Case, outcome: Outcome) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            one.function(**case)
    except pytest.skip.Exception:
        outcome.skipped += 1
    except NotImplementedError as error:
        if str(error).startswith(f"{argument} is "):
            outcome.refused[argument] += 1
        else:
            outcome.failures.append(f"{one.name}({_text(case)})\n  refused for another reason: {error}")
    except Exception as error:
        outcome.failures.append(
            f"{one.name}({_text(case)})\n  {argument} is not refused but: {type(error).__name__}: {error}"
        )
    else:
        outcome.failures.append(
            f"{one.name}({_text(case)})\n  {argument} is taken now: it is no more outside, see libraries.py"
        )


def _text(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", type=Path, help="the library's test file")
    parser.add_argument("--library", choices=LIBRARIES, default="flash_attn", help="whose it is")
    parser.add_argument("--cases", type=int, default=24, help="of each function, at most")
    parser.add_argument(
        "--refused", type=int, default=3, help="of each refused argument and function, at most"
    )
    parser.add_argument("--seconds", type=float, default=100, help="for running, after the kernels are built")
    parser.add_argument("--longest", type=int, default=10**9, help="leave out cases with a longer sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program")
    parser.add_argument("--gradients", action="store_true", help="run what the tests ask of gradients, too")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    library = LIBRARIES[options.library]
    left_out = library.left_out + (() if options.gradients else library.backward_only)
    with surroundings(options.device, options.gradients):
        found = samples(
            load(options.tests, library), library, options.cases, options.refused, options.longest, left_out
        )
        if options.device == "cuda" and not options.gradients:
            kernels = needed_kernels(found)
            major, minor = torch.cuda.get_device_capability()
            build_kernels(kernels, [10 * major + minor])
            print(f"{len(kernels)} kernels ready after {time.perf_counter() - begin:.0f} s", flush=True)
        end = time.perf_counter() + options.seconds
        outcomes = {}
        for i, one in enumerate(found):  # each has its share of what is left
            now = time.perf_counter()
            outcomes[one.name] = run(one, now + (end - now) / (len(found) - i))
    _print(found, outcomes, left_out)
    failed = sum(len(outcome.failures) for outcome in outcomes.values())
    passed = sum(outcome.passed for outcome in outcomes.values())
    refused = sum(outcome.refused.total() for outcome in outcomes.values())
    print(f"{time.perf_counter() - begin:.0f} s; {refused} refused by name as they should be")
    print(f"{passed} passed, {failed} failed")
    if options.json:
        rows = {
            one.name: {"grid": one.size, "outside": one.outside, **vars(outcomes[one.name])} for one in found
        }
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed or not passed else 0


def _print(found: list[Sample], outcomes: dict[str, Outcome], left_out: tuple[str, ...]) -> None:
    for one in found:
        outcome = outcomes[one.name]
        print(f"{one.name}: {outcome.passed} passed, {len(outcome.failures)} failed")
        if outcome.skipped:
            print(f"    skipped by the test itself: {outcome.skipped}")
        if outcome.not_run:
            print(f"    not run for want of time: {outcome.not_run}")
        print(f"    its grid: {one.size} cases, {one.size - sum(one.outside.values())} of them inside")
        for argument, n in one.outside.items():
            print(
                f"    outside: {n} with {argument}; refused by name when tried: {outcome.refused[argument]}"
            )
        for failure in outcome.failures[:5]:
            print(f"  FAILED {failure}")
    if left_out:
        print(f"left out: {', '.join(left_out)}")


if __name__ == "__main__":
    sys.exit(main())
