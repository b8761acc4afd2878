"""Small launches of the Ampere family's backward kernels, for NVIDIA's compute-sanitizer.

``python tests/gpu/sanitizer_backward_cases.py --build`` compiles all kernels first and launches them once,
outside the sanitizer; then::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python tests/gpu/sanitizer_backward_cases.py

For ``--tool racecheck``, both commands run with ``NVCC_APPEND_FLAGS=-DFLASH_EVERY_LANE_ARRIVES``
(sanitizer_cases.py says why). A number as the last argument takes only so many of the launches.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.append(str(Path(__file__).parents[1]))  # as pytest has it, for modules that tests share

import torch
from gradient_calls import Call, Case, problem_of_case

from flash_helpers import build
from flash_helpers.kernel_configs import BackwardKernel, DType
from flash_helpers.kernels.ampere.backward.choices import choices_for
from flash_helpers.kernels.ampere.backward.config import DQSum
from flash_helpers.select.candidates import kernel_for
from flash_helpers.test.gradients import run_gradients

# Several tiles and several blocks of keys, neither a whole number; two heads of a group; a hidden corner.
CASES = (
    Case(q=150, k=200, batch=1, options={"causal": True}),
    Case(q=(70, 1, 131), k=(130, 65, 140), d=(40, 56), sinks=True, dlse=True, options={"window": (90, 20)}),
)


def launches() -> list[tuple[Case, BackwardKernel]]:
    """Each case with every kernel that is chosen on this GPU, and with one that makes dQ by itself."""
    configs = []
    for choice in choices_for(torch.cuda.get_device_capability()):
        if choice.config.d_head in (64, 128, 256):
            configs += [choice.form(DType.BF16, deterministic) for deterministic in (True, False)]
    first = configs[0]
    own = replace(first, dq_sum=DQSum.OWN_KERNEL, dq_B_r=64, dq_B_c=64, dq_n_warps=4)
    found = []
    for case in CASES:
        for config in (*configs, own):
            sizes = case.sizes(config.d_head, config.d_head_v)
            found.append((case, kernel_for(config, problem_of_case(case, config.dtype, sizes))))
    return found


def main() -> None:
    """Launches every kernel once; builds them at first, if told to."""
    every = launches()
    if sys.argv[-1].isdigit():
        every = every[: int(sys.argv[-1])]
    major, minor = torch.cuda.get_device_capability()
    if "--build" in sys.argv:
        build.build_kernels([kernel for _, kernel in every], [10 * major + minor])
    for case, kernel in every:
        config = kernel.config
        call = Call(case, config.dtype, case.sizes(config.d_head, config.d_head_v))
        call.check(run_gradients(call.backward(), config))
        print(f"right: {kernel.short_form()}", flush=True)


if __name__ == "__main__":
    main()
