"""What runs follows from problem, GPU and tuning results; and all that tells of it says the same."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attention import attention, explain_choice, last_kernel, prepare
from flash_attention.backends.cuda import device_facts_of
from flash_attention.call import Mask, problem_of
from flash_helpers.kernel_configs import DType, ForwardKernel
from flash_helpers.kernels.families import direction_of
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import FINAL, Measurement, TuningDatabase
from flash_helpers.results.device import TunedDevice, sources_digest
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.select import ranking, select

TIME_LIMIT_S = 110

SETUP = """
import os, warnings, torch
from flash_attention import attention, explain_choice, forward, last_kernel, prepare
from flash_helpers.test.reference import reference

torch.manual_seed(0)
q, k, v = (torch.randn(2, 512, 4, 128, device="cuda").bfloat16() for _ in range(3))

def call():
    out = attention(q, k, v)
    again = attention(q, k, v)
    assert torch.equal(out, again)
    error = (out.double().cpu() - reference(q.cpu(), k.cpu(), v.cpu())[0]).abs().max().item()
    assert error < 0.02, error
    assert last_kernel() == explain_choice(q, k, v).kernel
    return last_kernel().short_form() + " " + str(out.float().sum().item())
"""
FRESH = """
print(call())
"""
# As after a first example: an Ampere kernel of the same head size is built, and nothing else.
AFTER_AN_EXAMPLE = """
from flash_helpers.kernel_configs import DType, choose_ampere_kernel

example, _ = choose_ampere_kernel(DType.BF16, 128, False, 512)
forward(example.config, q, k, v)
os.environ["FLASH_ATTENTION_JIT"] = "0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    substitute = call()
assert len([w for w in said if w.category is RuntimeWarning]) == 1, said
assert "FLASH_ATTENTION_JIT=0" in explain_choice(q, k, v).reason
assert last_kernel() == example
assert explain_choice(q, k, v).wanted is not None
os.environ["FLASH_ATTENTION_JIT"] = "1"
prepare([])
print(call())
"""


def start(program: str, cache: Path) -> subprocess.Popen[str]:
    """A process with a kernel cache of its own, empty at first."""
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + program],
        env={**os.environ, "FLASH_ATTENTION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_was_compiled_before_does_not_change_what_runs(tmp_path: Path) -> None:
    """Equal kernels and equal bits; without compiling the example's kernel runs, which is said once."""
    processes = [start(FRESH, tmp_path / "fresh"), start(AFTER_AN_EXAMPLE, tmp_path / "example")]
    ran = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=TIME_LIMIT_S)
            assert process.returncode == 0, err
            ran.append(out)
    finally:
        for process in processes:
            process.kill()
    assert ran[0] == ran[1]
    if torch.cuda.get_device_capability() == (9, 0):
        assert "wg)" in ran[0], "the Hopper family is not chosen"


GRID = [
    (d, queries, {"causal": causal, "return_lse": lse})
    for d, queries, causal, lse in itertools.product((64, 128), (1, 512), (False, True), (False, True))
]


def test_all_that_tells_of_a_call_agrees() -> None:
    calls = []
    for d, queries, options in GRID:
        q = torch.randn(2, queries, 8, d, device="cuda").bfloat16()
        k, v = (torch.randn(2, 512 if queries > 1 else 4096, 2, d, device="cuda").bfloat16() for _ in "kv")
        calls.append((q, k, v, options))
    prepare(
        [problem_of(q, k, v, Mask.of(o["causal"], (None, None)), lse=o["return_lse"]) for q, k, v, o in calls]
    )
    for q, k, v, options in calls:
        before = explain_choice(q, k, v, **options)
        for _ in range(3):  # the first one takes the long way, the others are remembered
            attention(q, k, v, **options)
            assert last_kernel() == before.kernel
        after = explain_choice(q, k, v, **options)
        assert (after.kernel, after.n_splits, after.reason) == (before.kernel, before.n_splits, before.reason)
        elsewhere = explain_choice(q, k, v, **options, facts=device_facts_of())
        assert (elsewhere.kernel, elsewhere.n_splits) == (before.kernel, before.n_splits)
        named = explain_choice(q, k, v, **options, config=before.kernel.config)
        attention(q, k, v, **options, config=before.kernel.config)
        assert last_kernel() == named.kernel
        assert named.n_splits == 1
        assert not named.kernel.traits.split


def test_tuning_results_of_another_process_count_from_prepare_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = TuningDatabase(tmp_path / "tuning.sqlite3")
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(database.path))
    prepare([])
    facts, size = device_facts_of(), Problem(DType.FP16, 2, 8, 512, 64)
    problem = attention_problem(size)
    default = select(problem, facts).kernel
    other = next(one.kernel for one in ranking(problem, facts)[1:] if not one.kernel.traits.split)
    q = torch.randn(2, 512, 8, 64, device="cuda").half()

    def agreed() -> ForwardKernel:
        attention(q, q, q)
        ran = last_kernel()
        assert ran == explain_choice(q, q, q).kernel
        attention(q, q, q)
        assert last_kernel() == ran
        assert ran is not None
        return ran

    first = agreed()
    for kernel, milliseconds in ((default, 2.0), (other, 1.0)):
        database.record(
            TunedDevice.of(facts),
            sources_digest(direction_of(kernel)),
            Bucket.of_problem(size, facts.sm_count),
            Measurement(kernel.short_form(), size, stage=FINAL, milliseconds=milliseconds, rounds=11),
        )
    assert agreed() == first
    prepare([])
    assert agreed() == other
    monkeypatch.delenv("FLASH_ATTENTION_TUNING_DB")
    prepare([])
    assert agreed() == explain_choice(q, q, q, facts=facts).kernel
