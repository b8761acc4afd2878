# %% [markdown]
# # The ladder, step by step
#
# A kernel of this library is a value. The steps by which a slow kernel became a fast one are therefore still
# there: each is a configuration that can be run, checked, explained and timed today. This page climbs the
# Ampere family's ladder. Everything but the last cell runs without a GPU.

# %%
from dataclasses import asdict

import torch

import flash_attention
from flash_helpers.explain import explain
from flash_helpers.kernel_configs import DType, device_facts, get_kernel_progression_configs
from flash_helpers.problem import Problem
from flash_helpers.test.reference import reference

steps = [config for config in get_kernel_progression_configs() if config.dtype is DType.FP16]
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## What changes from step to step
#
# Only the fields that differ from the step before are printed.

# %%
before: dict[str, object] = {}
for number, step in enumerate(steps, start=1):
    fields = asdict(step)
    changed = {name: value for name, value in fields.items() if before and before[name] != value}
    print(f"{number:2} {step.short_form()}")
    if changed:
        print("   " + ", ".join(f"{name}: {before[name]} -> {value}" for name, value in changed.items()))
    before = fields

# %% [markdown]
# ## Every step is right
#
# Steps differ in speed, not in what they compute. `forward` runs exactly the configuration that it is given;
# the reference is float64.

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 128, 2, 128, generator=generator).half().to(device) for _ in range(3))
expected, _ = reference(q, k, v)
for number, step in enumerate(steps, start=1):
    out = flash_attention.forward(step, q, k, v)
    error = (out.double() - expected).abs().max().item()
    print(f"{number:2} largest error {error:.1e}")
    assert error < 2e-3

# %% [markdown]
# ## Why a step is faster
#
# What a GPU would do with each step can be computed: registers, shared memory, blocks that fit on a
# multiprocessor, and how many passes the shared memory takes to serve one load. Without the swizzle, rows of
# a tile lie in the same banks and each load takes eight times as long: nothing that comes after it shows
# before that is gone.

# %%
problem = Problem(DType.FP16, batch=16, heads=16, seq_len=4096, d_head=128)
facts = device_facts("A100")
for number, step in enumerate(steps, start=1):
    found = explain(step, problem, facts)
    slowest = max(found.accesses, key=lambda access: access.wavefronts)
    print(
        f"{number:2} registers {found.registers.total:3}, shared memory {found.smem_bytes:6} bytes, "
        f"{found.performance.occupancy.blocks} blocks per SM, "
        f"slowest shared access: {slowest.wavefronts} wavefronts "
        f"({slowest.name})"
    )

# %% [markdown]
# ## What each step gains
#
# The time of a kernel alone, the median of several calls, on the GPU that is here. `flash-attention ladder`
# measures the same beside the best peers, in random order, and writes figures.

# %%
if device == "cpu":
    print("skipped: no GPU here, so there is no kernel to time")
else:
    q, k, v = problem.inputs(torch.device(device))
    previous = None
    for number, step in enumerate(steps, start=1):
        times = sorted(flash_attention.forward_timed(step, q, k, v)[1] for _ in range(9))
        rate = problem.flop() / times[4] / 1e9  # TFLOP/s
        gain = f", {rate / previous:.3f} times the step before" if previous else ""
        print(f"{number:2} {rate:6.1f} TFLOP/s{gain}")
        previous = rate
