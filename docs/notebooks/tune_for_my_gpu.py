# %% [markdown]
# # Tune for my GPU
#
# `attention` chooses a kernel for each problem: by what was measured on the card, else by a model. This page
# looks at the model's choice, measures the candidates on the GPU that is here, and sees the choice change
# its reason. Without a GPU it shows the model's choices for an A100 and skips what has to be measured.

# %%
import os
import tempfile
from pathlib import Path

import torch

import flash_attention
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.problem import Problem
from flash_helpers.tune.space import prune, tuning_space

has_gpu = torch.cuda.is_available()
problem = Problem(DType.BF16, batch=4, heads=16, seq_len=2048, d_head=128, causal=True)
# A file of this page's own: what you tuned before stays as it is. Without this line, results are kept.
os.environ["FLASH_ATTENTION_TUNING_DB"] = str(Path(tempfile.mkdtemp()) / "tuning.sqlite3")

# %% [markdown]
# ## What the model says

# %%
if has_gpu:
    from flash_attention.backends.cuda import device_facts_of

    facts = device_facts_of("cuda")
else:
    facts = device_facts("A100")
shape = (problem.batch, problem.seq_len, problem.heads, problem.d_head)
x = torch.empty(shape, dtype=torch.bfloat16)  # a choice for a GPU that need not hold the tensors
choice = flash_attention.explain_choice(x, x, x, causal=True, facts=facts)
print(facts.name)
print(choice.kernel.short_form())
print(choice.reason)

# %% [markdown]
# ## What is worth measuring
#
# The tuning space is every configuration that may be the fastest somewhere. For one problem on one card most
# of it is ruled out before anything is compiled, each candidate with its reason.

# %%
space = [c for c in tuning_space() if (c.dtype, c.d_head) == (problem.dtype, problem.d_head)]
kept, pruned = prune(space, problem, facts)
print(f"{len(space)} configurations, {len(kept)} worth measuring")
for dropped in pruned[:5]:
    print(f"{dropped.kernel.short_form()}: {dropped.reason}")

# %% [markdown]
# ## Measure
#
# Candidates are compiled in parallel, compared with a reference, and timed by successive halving. Every
# result is kept as soon as it is there: run the cell again and it goes on.

# %%
if has_gpu:
    from flash_helpers.tune.tuner import tune

    (tuned,) = tune([problem], device=torch.device("cuda"), budget=120)
    for measurement in [m for m in tuned.results if m.milliseconds][:5]:
        print(f"{measurement.milliseconds:7.3f} ms  {measurement.kernel}")
else:
    print("skipped: no GPU here, so there is nothing to measure on")

# %% [markdown]
# ## What `attention` does from now on
#
# `flash-attention tune --export` makes the results a table that ships with the package.

# %%
if has_gpu:
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    choice = flash_attention.explain_choice(x, x, x, causal=True)
    print(choice.kernel.short_form())
    print(choice.reason)
else:
    print("skipped: nothing was measured")
