"""Runs PyTorch's own tests of context parallelism on this library: the path of its test file is the argument.

    python tests/compat/run_torch_context_parallel.py .../pytorch/test/distributed/tensor/test_attention.py

The file is run as it is, with its own inputs and tolerances, on processes that talk by gloo. The names of
PyTorch's context parallelism are this library's there (``torch_context_parallel_names.py``), and each case is
run once for each method. What asks for what is PyTorch's alone is counted with its reason: its collectives
are not counted, ``torch.compile`` in one graph does not go, and float32 has no public function, so that
SDPA is run in bfloat16 and flex_attention past the checks. A test that this program does not know is told.

The exit status is 1 when a case fails, when nothing has run, or when the file has a test unknown here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import queue
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch_context_parallel_names import DoesNotApplyError, Names, install_test_modules

METHODS = ("all_gather", "ring", "ulysses")
RUN = (
    "RingAttentionTest.test_ring_attention_sdpa",
    "CPFlexAttentionTest.test_cp_flex_attention_causal_mask",
    "CPFlexAttentionTest.test_cp_flex_attention_document_mask",
    "TestSharding.test_context_parallel_shard",
)
ELSEWHERE = {
    "RingAttentionTest.test_is_causal_behavior": "asks a private function of PyTorch's ring",
    "TestCPCustomOps.test_flex_cp_custom_op": "checks an operator of PyTorch's",
    "TestSharding.test_attention_shard_without_cp": "checks DTensor's rules without context parallelism",
}


@dataclass
class Outcome:
    """What became of one test's cases on a rank."""

    passed: int = 0
    does_not_apply: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Runner:
    """Runs the tests of a file on this rank.

    Args:
        module: the file, with this library's names.
        names: those names.
        options: of the command line.
    """

    def __init__(self, module: ModuleType, names: Names, options: argparse.Namespace) -> None:
        self._module, self._names, self._options = module, names, options

    def run(self, name: str) -> Outcome:
        outcome = Outcome()
        kind, test = name.split(".")
        instance = self._class(getattr(self._module, kind), outcome)(test)
        begin = self._names.calls
        try:
            getattr(instance, test)()
        except unittest.SkipTest as reason:
            outcome.does_not_apply[str(reason)] += 1
        except Exception:
            outcome.failures.append(traceback.format_exc(limit=-3))
        else:
            # A test without cases of its own is one, whatever it calls.
            if not (outcome.passed or outcome.failures or outcome.does_not_apply):
                outcome.passed += 1
        if name != "TestSharding.test_context_parallel_shard" and outcome.passed:
            assert self._names.calls > begin, f"{name} has not called this library"
        return outcome

    def _class(self, theirs: type, outcome: Outcome) -> type:
        """Their class with as many ranks as there are, whose cases are tried one by one."""
        runner = self

        class Ours(theirs):  # type: ignore[misc, valid-type]
            world_size = runner._options.world

            def run_subtests(self, axes: dict[str, list[Any]], function: Callable[..., Any]) -> None:
                for values in itertools.product(*axes.values()):
                    runner._try(outcome, function, dict(zip(axes, values, strict=True)))

            def _test_cp_flex_attention(self, **case: Any) -> None:
                runner._try(outcome, super()._test_cp_flex_attention, case)
                if case["qkv_size"] % (128 * self.world_size):
                    raise unittest.SkipTest("lengths that PyTorch refuses are computed here")

        return Ours

    def _try(self, outcome: Outcome, function: Callable[..., Any], case: dict[str, Any]) -> None:
        reason = self._reason_against(case)
        if reason:
            outcome.does_not_apply[reason] += 1
            return
        for method in METHODS:
            self._names.method = method
            torch.manual_seed(0)
            try:
                function(**case)
                outcome.passed += 1
            except DoesNotApplyError as error:
                outcome.does_not_apply[str(error)] += 1
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                shown = {
                    name: x for name, x in case.items() if name not in ("block_mask", "document_lengths")
                }
                outcome.failures.append(f"{method} {shown}: {said[:1000]}")

    def _reason_against(self, case: dict[str, Any]) -> str:
        if case.get("compiled"):
            return "torch.compile with fullgraph=True: the graph breaks at the call"
        if "rotater" in case and case["rotater"].name == "ALL_TO_ALL":
            return "counts the collectives of PyTorch's ring"
        if "backend" in case and case["backend"].name == "EFFICIENT_ATTENTION":
            return "float32 is refused by the public function"
        if case.get("load_balance") and not case["is_causal"]:
            return "PyTorch's test leaves it out"
        if case.get("qkv_size", 0) > self._options.longest:
            return f"longer than {self._options.longest} tokens (--longest)"
        return ""


def load(path: Path, names: Names) -> ModuleType:
    """Imports the test file, with the names of context parallelism being this library's."""
    install_test_modules()
    spec = importlib.util.spec_from_file_location("torch_context_parallel_tests", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names.install(module)
    return module


def tests_of(module: ModuleType) -> list[str]:
    """The tests of a file, by class."""
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, unittest.TestCase)]
    return [
        f"{kind.__name__}.{name}"
        for kind in classes
        for name in vars(kind)
        if name.startswith("test_") and kind.__module__ == module.__name__
    ]


def on_rank(rank: int, store: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, options.world), rank=rank, world_size=options.world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    names = Names()
    module = load(options.tests, names)
    found: dict[str, Outcome | str] = {}
    for name in tests_of(module):
        if name in ELSEWHERE:
            found[name] = ELSEWHERE[name]
        elif name not in RUN:
            found[name] = "unknown"
        elif options.only and not any(word in name for word in options.only):
            found[name] = "left out (--only)"
        elif name.startswith("TestSharding") and options.world != 2:
            found[name] = "is made for two ranks"
        else:
            found[name] = Runner(module, names, options).run(name)
    results.put((rank, found))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still wait for the interpreter


def report(found: list[dict[str, Any]]) -> int:
    """Prints what became of each test on all ranks; the exit status."""
    ran, bad = 0, False
    for name, of_zero in found[0].items():
        if isinstance(of_zero, str):
            bad |= of_zero == "unknown"
            print(f"{name}: {of_zero}")
            continue
        failures = [f"rank {rank}: {text}" for rank, x in enumerate(found) for text in x[name].failures]
        ran, bad = ran + of_zero.passed, bad or bool(failures)
        print(f"{name}: {of_zero.passed} passed, {len(failures)} failed")
        for reason, count in of_zero.does_not_apply.items():
            print(f"  {count} do not apply: {reason}")
        for text in failures[:6]:
            print(f"  {text}")
    print(f"{ran} cases passed")
    return int(bad or not ran)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", type=Path, help="PyTorch's test/distributed/tensor/test_attention.py")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--longest", type=int, default=512, help="leave out longer cases of flex_attention")
    parser.add_argument("--only", nargs="+", default=[], help="words of the tests that are run")
    parser.add_argument("--seconds", type=float, default=1200, help="for all of it")
    options = parser.parse_args(arguments)
    context = mp.get_context("spawn")
    results = context.Queue()
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_rank, args=(rank, f"{folder}/store", options, results), daemon=True)
            for rank in range(options.world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + options.seconds
        while len(found) < options.world and time.monotonic() < end:
            if all(not process.is_alive() for process in ranks) and results.empty():
                break
            try:
                rank, answer = results.get(timeout=1)
            except queue.Empty:  # nothing yet
                continue
            found[rank] = answer
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    if len(found) < options.world:
        print(f"{options.world - len(found)} of {options.world} ranks have given no result")
        return 1
    return report([found[rank] for rank in range(options.world)])


if __name__ == "__main__":
    sys.exit(main())
