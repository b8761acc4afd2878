"""Calls as a GPU's launcher gets them, without a GPU: ``python launched_calls.py FAMILY FOLDER``.

Choices, arguments and launch code are the real ones. The library is what a kernel library is, but compiled by
the host's compiler against a CUDA runtime that launches nothing and refuses what CUDA would
(tests/cpp/fake_cuda/launch_rules.hpp). A process of its own, since such kernels can't be told from real ones.

Prints what was refused, one a line, then how many calls, kernels and launches there were.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import flash_attention_kernels as binding
from random_launches import calls

from flash_attention.backends import cuda, cuda_form
from flash_attention.call import Call, Ran
from flash_attention.run import passes
from flash_attention.run.cuda_choice import choice_for
from flash_helpers.build.instantiations import kernel_source, library_source, table_source
from flash_helpers.build.sources import include_root
from flash_helpers.kernels.device_facts import DeviceFacts, device_facts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.chosen import Choice
from flash_helpers.select.select import usable_part, with_slots

FAKE = Path(__file__).parents[2] / "cpp" / "fake_cuda"
DEVICES = {"hopper": "H200", "ampere": "A100"}
NOWHERE = -1  # the device index of a tensor on the CPU


class Recorder:
    """In the place of the choice and of the backend: keeps the calls, and runs nothing."""

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts, self.text = facts, ""
        self.made: list[tuple[str, Call, Choice]] = []

    def choose(self, problem: AttentionProblem, *_: Any) -> Choice:
        choice = choice_for(problem, self.facts, "cuda:0", None, explained=False)
        return with_slots(choice, usable_part(problem, self.facts)[1])

    def run(self, call: Call, choice: Choice) -> Ran:
        self.made.append((self.text, call, choice))
        return Ran(choice.kernel)


def recorded(facts: DeviceFacts, limit_of_sms: bool) -> list[tuple[str, Call, Choice]]:
    """All calls, with what a GPU would run."""
    recorder = Recorder(facts)
    with (
        mock.patch.object(passes, "choose", recorder.choose),
        mock.patch.object(passes, "backend", return_value=recorder),
    ):
        for recorder.text, call in calls(limit_of_sms):
            call()
    return recorder.made


def load(kernels: Iterable[Kernel], target: int, folder: Path) -> ctypes.CDLL:
    """Compiles the host side of kernels of one direction and loads it."""
    folder.mkdir()
    (folder / "flash_kernels.cuh").write_text(table_source(list(kernels)))
    source, library = folder / "library.cpp", folder / "library.so"
    source.write_text("".join(kernel_source(kernel, target) for kernel in kernels) + library_source())
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-w"]
    flags += ["-include", "common/ptx.cuh"]  # which says what device functions are
    includes = [f"-I{path}" for path in (FAKE, include_root(), folder)]
    subprocess.run(["g++", *flags, *includes, str(source), "-o", str(library)], check=True, timeout=600)
    binding.load_library(str(library))
    return ctypes.CDLL(str(library))


def refused(made: list[tuple[str, Call, Choice]], facts: DeviceFacts) -> list[str]:
    """What the runtime, or the launcher itself, refuses of the calls."""
    launches: dict[Kernel, Any] = {}
    for kernel in {choice.kernel for _, _, choice in made}:
        compiled = binding.find(kernel.config, kernel.traits, facts.target)
        compiled.load()
        launches[kernel] = compiled.launch
    found = []
    with (
        mock.patch.object(cuda, "current_device", return_value=NOWHERE),
        mock.patch.object(cuda, "current_stream", return_value=0),
        mock.patch.object(cuda, "_launches", {NOWHERE: launches}),
        mock.patch.object(cuda, "launch_error", lambda *given: RuntimeError(given[-1])),
        mock.patch.object(cuda_form, "device_facts_of", return_value=facts),
    ):
        for text, call, choice in made:
            try:
                cuda.run(call, choice)
            except RuntimeError as error:
                found.append(f"{text}: {choice.kernel.short_form()}: {error}")
    return found


def main(family: str, folder: str) -> None:
    facts = device_facts(DEVICES[family])
    made = recorded(facts, limit_of_sms=family == "hopper")
    kernels = sorted({choice.kernel for _, _, choice in made}, key=repr)
    directions = {direction_of(kernel) for kernel in kernels}
    libraries = [
        load(
            [k for k in kernels if direction_of(k) is direction], facts.target, Path(folder, direction.label)
        )
        for direction in directions
    ]
    for line in refused(made, facts):
        print(line)
    launches = sum(library.fake_cuda_launches() for library in libraries)
    print(json.dumps({"calls": len(made), "kernels": len(kernels), "launches": launches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
