"""Runs FlashAttention's own tests on this library: the path of its test file is the argument.

    python tests/compat/run_flash_attn_tests.py .../flash_attn-2.8.3/tests/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --names 3 --gradients .../hopper/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --names 3-cache .../hopper/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --names 3-race --gradients .../hopper/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --names vllm .../tests/kernels/attention/test_flash_attn.py
    python tests/compat/run_flash_attn_tests.py --names 4 --gradients .../tests/cute/test_flash_attn.py

The file comes with flash-attn's sources (PyPI's source distribution has it) and is run as it is, with its own
inputs, references and tolerances. ``flash_attn`` is this library there, and so are the modules of
FlashAttention-3 and -4, of whose tests those of gradients are run. What is done to it while it runs:

- Without ``--gradients`` gradients are off, and ``torch.autograd.grad`` gives zeros. What the tests assert of
  gradients then compares zero with zero and says nothing; what they assert of outputs is untouched. Functions
  that test nothing but gradients are left out, by name. With ``--gradients`` all is run as it stands.
- Each function runs a sample of its grid, the same in every run. Cases that need what the library refuses are
  counted by argument, and of each argument a few are run, which must raise ``NotImplementedError`` naming it.
  Counted apart, too, are cases where a gradient has to be exactly 0 (``zero_gradients``).
- ``3-race`` needs a GPU of more than 70 GiB: each case of that test runs both passes 1,000 times.
- On a GPU the kernels that the sample needs, of gradients too, are compiled first, in parallel.
  ``--build-for`` does that alone, where no GPU is. Several processes with ``--part`` share the cases.

The exit status is 1 when a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from flash_attn_module import install
from needed_kernels import needed_kernels
from newer_flash_attn_modules import install_4
from parameter_grid import Case, Sample, sample
from server_modules import install_3, install_vllm
from torch.overrides import TorchFunctionMode
from zero_gradients import only_zero_was_allowed

from flash_attention.backends.cuda import device_facts_of
from flash_helpers.build import build_kernels
from flash_helpers.kernel_configs import device_facts

# Functions that assert nothing but gradients.
BACKWARD_ONLY = (
    "test_flash_attn_bwd_overflow",
    "test_flash_attn_bwd_transpose",
    "test_flash_attn_bwd_varlen_overflow",
    "test_flash_attn_deterministic",
    "test_flash_attn_varlen_deterministic",
)
# By parameter of the tests: the argument that is refused, and for which values.
OUTSIDE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dropout_p": ("dropout_p", lambda p: p > 0),
}
# The same of functions whose inputs require grad, with ``--gradients``.
OUTSIDE_GRADIENTS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "test_flash_attn_varlen_causal": {
        "paged_kv_block_size": ("block_table", lambda size: size is not None),
    },
    "test_flash_attn_varlen_output": {"add_unused_qkv": ("seqused_q", bool)},
}


@dataclass(frozen=True)
class Names:
    """What is particular to the tests of one of FlashAttention's packages.

    Attributes:
        install: makes the modules that the file at a path imports.
        functions: that are run; empty: all.
        outside: as ``OUTSIDE``.
        settings: globals of the test file that are set.
        largest_d_v: where a test loops over head sizes of V, larger ones are left out.
    """

    install: Callable[[Path], None]
    functions: tuple[str, ...] = ()
    outside: dict[str, tuple[str, Callable[[Any], bool]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    largest_d_v: int = 0


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


NAMES = {
    "2": Names(lambda path: install(), (), OUTSIDE),
    "3": Names(
        install_3,
        ("test_flash_attn_output", "test_flash_attn_varlen_output"),
        {"dtype": ("q_descale", _is_float8), "has_qv": ("qv", bool)},
        {"DISABLE_LOCAL": True},  # after its grid is made: no attention_chunk
        256,
    ),
    "3-race": Names(partial(install_3, without=("FP8",)), ("test_flash_attn_race_condition",)),
    "3-cache": Names(
        partial(install_3, without=("FP8", "BACKWARD")),
        (
            "test_flash_attn_output", "test_flash_attn_varlen_output", "test_flash_attn_kvcache",
            "test_flash_attn_combine",
        ),
        {"has_qv": ("qv", bool)},
        {"DISABLE_LOCAL": True},  # after its grid is made: no attention_chunk
        256,
    ),
    "vllm": Names(
        install_vllm,
        outside={"q_dtype": ("q_descale", lambda dtype: dtype is not None)},
    ),
    "4": Names(
        install_4,
        (
            "test_flash_attn_output", "test_flash_attn_learnable_sink_backward_dtype",
            "test_flash_attn_varlen_learnable_sink_backward_with_lse", "test_flash_attn_small_head_dim",
            "test_flash_attn_varlen_output", "test_flash_attn_lse_grad", "test_flash_attn_lse_grad_unused",
            "test_flash_attn_seqlen_k_zero", "test_flash_attn_empty_q_dense",
            "test_flash_attn_empty_q_varlen", "test_flash_attn_canonicalizes_unaligned_inputs",
            "test_flash_attn_varlen_cumsum_metadata_paths",
        ),
        {
            "has_qv": ("qv", bool),
            "sink_dtype": ("learnable_sink", lambda dtype: dtype == torch.float16),
            "unpad_q": ("seqused_q", lambda packed: not packed),
            "unpad_kv": ("seqused_k", lambda packed: not packed),
            "cumsum_mode": ("scheduler_metadata", lambda mode: mode == "metadata_cumsum_only"),
        },
    ),
}  # fmt: skip


class SmallHeads:
    """``itertools`` for tests that loop over head sizes of V: those beyond the library's are left out."""

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def product(self, first: Any, *others: Any) -> Iterator[Any]:
        """Of the first axis, numbers above the largest head size are left out."""
        kept = [x for x in first if type(x) is not int or x <= self._largest]
        return itertools.product(kept, *others)


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
            stack.enter_context(mock.patch("torch.cuda.synchronize"))
            stack.enter_context(mock.patch("torch.set_default_device"))
            stack.enter_context(mock.patch("torch.cuda.empty_cache"))
        yield


def load(path: Path, names: Names) -> ModuleType:
    """Imports the test file, with the modules that it imports being this library."""
    names.install(path.absolute())
    spec = importlib.util.spec_from_file_location("flash_attn_tests", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(names.settings)
    if names.largest_d_v:
        vars(module)["itertools"] = SmallHeads(names.largest_d_v)
    return module


def samples(
    module: ModuleType,
    n_cases: int,
    n_refused: int,
    longest: int,
    left_out: tuple[str, ...],
    names: Names,
    only: Mapping[str, Sequence[str]] = {},
    gradients: bool = False,
) -> list[Sample]:
    """What is run of the file's test functions, in its order.

    Args:
        left_out: functions that are not.
        only: of a parameter, the values that cases may have, as text.
        gradients: what is asked of gradients is run, too.
    """

    def short(case: Case) -> bool:
        if any(str(case[name]) not in values for name, values in only.items() if name in case):
            return False
        lengths = (n for name, n in case.items() if name.startswith(("seqlen", "num_blocks")))
        return all(n <= longest for n in lengths if type(n) is int)

    found = []
    for name, function in vars(module).items():
        chosen = name.startswith("test_") and (not names.functions or name in names.functions)
        if chosen and callable(function) and name not in left_out:
            rules = names.outside | (OUTSIDE_GRADIENTS.get(name, {}) if gradients else {})

            def outside(case: Case, rules: dict[str, Any] = rules) -> list[str]:
                hits = (rules[p] for p in case if p in rules and rules[p][1](case[p]))
                return list(dict.fromkeys(argument for argument, _ in hits))

            found.append(sample(name, function, n_cases, n_refused, outside, short))
    return found


# ---------------------------------------------------------------------- running
@dataclass
class Outcome:
    """What became of one function's cases."""

    passed: int = 0
    skipped: int = 0
    not_run: int = 0
    only_zero: int = 0  # gradients that are the rounding of their sums, where the tests allow 0 alone
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
        except (pytest.skip.Exception, pytest.xfail.Exception):
            outcome.skipped += 1
        except (Exception, pytest.fail.Exception) as error:
            if isinstance(error, AssertionError) and only_zero_was_allowed(error.__traceback__):
                outcome.only_zero += 1
                continue
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
        if re.search(rf"\b{argument}\b", str(error)):
            outcome.refused[argument] += 1
        else:
            outcome.failures.append(f"{one.name}({_text(case)})\n  refused for another reason: {error}")
    except (Exception, pytest.fail.Exception) as error:
        outcome.failures.append(
            f"{one.name}({_text(case)})\n  {argument} is not refused but: {type(error).__name__}: {error}"
        )
    else:
        outcome.failures.append(
            f"{one.name}({_text(case)})\n  {argument} is taken now: it is no more outside, see OUTSIDE"
        )


def _text(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", type=Path, help="flash-attn's tests/test_flash_attn.py")
    parser.add_argument("--names", choices=NAMES, default="2", help="of which FlashAttention the tests are")
    parser.add_argument("--cases", type=int, default=24, help="of each function, at most")
    parser.add_argument(
        "--refused", type=int, default=3, help="of each refused argument and function, at most"
    )
    parser.add_argument("--seconds", type=float, default=100, help="for running, after the kernels are built")
    parser.add_argument(
        "--longest", type=int, default=10**9, help="leave out cases with a longer sequence, or more pages"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="leave out cases with other values",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program")
    parser.add_argument(
        "--part", default="0/1", help="I/N: the I-th of N parts of the cases, of several processes"
    )
    parser.add_argument("--gradients", action="store_true", help="run what the tests ask of gradients, too")
    parser.add_argument("--functions", default="", help="run those whose name has this expression alone")
    parser.add_argument(
        "--build-for", help="a GPU that need not be there: compile what all cases need on it, and run none"
    )
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args(arguments)
    begin, names = time.perf_counter(), NAMES[options.names]
    left_out = () if options.gradients else BACKWARD_ONLY
    with surroundings(options.device, options.gradients):
        module = load(options.tests, names)
        only = {name: values.split(",") for name, values in (text.split("=") for text in options.only)}
        found = samples(
            module, options.cases, options.refused, options.longest, left_out, names, only, options.gradients
        )
        part, parts = map(int, options.part.split("/"))
        found = [one for one in found if re.search(options.functions, one.name)]
        found = [replace(one, cases=one.cases[part::parts]) for one in found]
        if options.device == "cuda" or options.build_for:
            facts = device_facts(options.build_for) if options.build_for else device_facts_of("cuda")
            calls = [partial(one.function, **case) for one in found for case in one.cases]
            kernels = needed_kernels(calls, facts)
            print(f"{len(kernels)} kernels to build after {time.perf_counter() - begin:.0f} s", flush=True)
            build_kernels(kernels, [facts.target])
            print(f"{len(kernels)} kernels ready after {time.perf_counter() - begin:.0f} s", flush=True)
            if options.build_for:
                return 0
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
        if outcome.only_zero:
            print(f"    not 0, where the tests allow 0 alone: {outcome.only_zero}")
        for failure in outcome.failures[:5]:
            print(f"  FAILED {failure}")
    if left_out:
        print(f"left out, since they assert nothing but gradients: {', '.join(left_out)}")


if __name__ == "__main__":
    sys.exit(main())
