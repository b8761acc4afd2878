"""One tiny launch of each kind of kernel, for NVIDIA's compute-sanitizer.

``python tests/gpu/sanitizer.py --build`` compiles the kernels first, outside the sanitizer; then::

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitizer.py

For ``--tool racecheck``, both commands run with ``NVCC_APPEND_FLAGS=-DFLASH_EVERY_LANE_ARRIVES``: where a
warp frees a slot of shared memory, one lane arrives at the slot's mbarrier for all. The tool takes the other
lanes' reads for unordered, so in this build every lane arrives; nothing else differs.

Every tensor is an allocation of its own, without PyTorch's cache around it. What a kernel reads is made, and
what it writes is compared with float64, on the CPU: the kernels under test are the only ones.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from types import ModuleType

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import sanitizer_backward
import sanitizer_forward
import torch

from flash_attention.backends.cuda import device_facts_of
from flash_helpers import build
from flash_helpers.kernels.device_facts import DeviceFacts, device_facts
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, FORWARD

CASES: dict[str, ModuleType] = {FORWARD: sanitizer_forward, BACKWARD: sanitizer_backward}


def picked(kernels: Sequence[Kernel], words: Sequence[str]) -> list[Kernel]:
    """Those whose short form has every word; of these, a word ``2/12`` takes the third twelfth."""
    parts = [word for word in words if re.fullmatch(r"\d+/\d+", word)]
    found = [k for k in kernels if all(word in k.short_form() for word in words if word not in parts)]
    for part in parts:
        first, step = map(int, part.split("/"))
        found = found[first::step]
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One tiny launch of each kind of kernel.")
    parser.add_argument("words", nargs="*", help="parts of a kernel's short form; 2/12 for the third twelfth")
    parser.add_argument("--direction", choices=list(CASES), help="default: both")
    parser.add_argument("--build", action="store_true", help="compile only")
    parser.add_argument("--list", action="store_true", help="print the kernels; with --device without a GPU")
    parser.add_argument("--device", help="with --list: a card, e.g. A100; default: the one that is there")
    return parser.parse_args()


def main() -> None:
    """Lists the kernels, compiles them, or runs each once."""
    given = arguments()
    facts: DeviceFacts = device_facts(given.device) if given.device else device_facts_of("cuda")
    cases = {
        direction: picked(module.kernels(facts), given.words)
        for direction, module in CASES.items()
        if given.direction in (None, direction)
    }
    if given.list:
        for kernel in (kernel for kernels in cases.values() for kernel in kernels):
            print(kernel.short_form())
        return
    if given.device:
        raise SystemExit("--device goes with --list: kernels run on the GPU that is there; leave it out")
    if given.build:
        major, minor = torch.cuda.get_device_capability()
        for direction, kernels in cases.items():
            build.build_kernels(kernels, [10 * major + minor])
            print(f"{len(kernels)} kernels of the direction {direction} are built")
        return
    for direction, kernels in cases.items():
        for kernel in kernels:
            CASES[direction].run(kernel)
            print(f"right: {kernel.short_form()}", flush=True)


if __name__ == "__main__":
    main()
