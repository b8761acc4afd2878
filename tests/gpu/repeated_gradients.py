"""Runs deterministic gradients many times beside other work, and compares their bits: a program of its own,
since kernels that wait for each other could wait for ever.

``python tests/gpu/repeated_gradients.py N`` repeats each of the Ampere family's chosen kernels N times.
"""

from __future__ import annotations

import sys

import torch
from gradient_calls import Call, Case

from flash_helpers import build
from flash_helpers.kernel_configs import BackwardKernel, DType
from flash_helpers.kernels.ampere.backward.choices import choices_for
from flash_helpers.kernels.traits import BackwardTraits
from flash_helpers.test.gradients import run_gradients

# More blocks of keys than wait for one another in one row of SMs, and heads of a group.
CASES = (
    Case(q=1000, k=1000, batch=2, heads=(8, 8), dlse=True, options={"causal": True}),
    Case(q=700, k=2100, batch=2, heads=(8, 2)),
)


def main(repeats: int) -> None:
    """Says how many were equal.

    Raises:
        SystemExit: two runs differ.
    """
    major, minor = torch.cuda.get_device_capability()
    configs = [c.form(t, True) for c in choices_for((major, minor)) for t in (DType.BF16,)]
    kernels = [BackwardKernel(c, BackwardTraits(causal=x)) for c in configs for x in (False, True)]
    build.build_kernels(kernels, [10 * major + minor])
    busy = torch.cuda.Stream()
    noise = torch.randn(1 << 19, device="cuda")
    for config in configs:
        for case in CASES:
            call = Call(case, config.dtype, (config.d_head, config.d_head_v))
            backward = call.backward(deterministic=True)
            first = {name: x.clone() for name, x in run_gradients(backward, config).items()}
            equal = torch.ones((), dtype=torch.bool, device="cuda")
            for i in range(repeats):
                if i % 4 == 0:
                    with torch.cuda.stream(busy):
                        noise.sort()
                for name, gradient in run_gradients(backward, config).items():
                    equal &= (gradient == first[name]).all()
            if not equal:
                raise SystemExit(f"{config.short_form()}: runs of {case} differ")
            print(f"{repeats} equal: {config.short_form()}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
