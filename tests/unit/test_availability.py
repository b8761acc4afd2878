"""The kernel that runs, whatever the cache holds; and what runs where compiling is off or fails.

The GPU and its cache of kernels are acted: facts, what is built, and whether compiling works.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attention import explain_choice, prepare
from flash_attention.backends import backend
from flash_attention.errors import KernelCompileError, KernelNotBuiltError
from flash_attention.mods.tracing import trace
from flash_attention.run import availability, choices, cuda_choice
from flash_helpers import generation
from flash_helpers.kernel_configs import DType, ForwardKernel, device_facts
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import default_candidates, kernel_for
from flash_helpers.select.select import ranking, select

CUDA = torch.device("cuda", 0)
PLAIN = AttentionProblem(DType.BF16, 4, 4096, 4096, 16, 16, 128, 128)
PROBLEMS = {
    "plain": PLAIN,
    "causal": replace(PLAIN, right=0),
    "decode": replace(PLAIN, seq_len_q=1, seq_len_k=16384),
    "padded": replace(PLAIN, d_head=72, d_head_v=72),
    "window": replace(PLAIN, left=512, right=0),
}


class Machine:
    """A GPU with the facts of a known one, a cache of kernels, and a compiler that works or does not."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.facts = device_facts(name)
        self.built: set[ForwardKernel] = set()
        self.compiled: list[ForwardKernel] = []
        self.obstacle: str | None = None
        self.broken = False
        self.refused: set[ForwardKernel] = set()  # by the compiler
        for module in (choices, cuda_choice, availability):
            monkeypatch.setattr(module, "backend", lambda name: self if name == "cuda" else backend(name))

    def device_facts_of(self, device):
        return self.facts

    def load_kernel(self, kernel, target):
        assert target == self.facts.target
        return kernel if kernel in self.built else None

    def build_obstacle(self):
        return self.obstacle

    def get_kernel(self, kernel, device):
        if kernel in self.built:
            return kernel
        if self.obstacle:
            raise KernelNotBuiltError(f"not built, and {self.obstacle}", (), "flash-attention build")
        self.compiled.append(kernel)
        if self.broken or kernel in self.refused:
            raise KernelCompileError(kernel.short_form(), "nvcc …", ["no space left on device"], Path("log"))
        self.built.add(kernel)
        return kernel

    def spill_bytes(self, kernel, device):
        return 0

    def explain(self, problem: AttentionProblem):
        return choices._choice(problem, CUDA, None, explained=True)


@pytest.fixture(params=["H200", "H100", "A100", "RTX4090"])
def machine(request, monkeypatch, tmp_path) -> Iterator[Machine]:
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(tmp_path / "none.sqlite3"))
    monkeypatch.setattr(availability, "_warned", set())
    acted = Machine(request.param, monkeypatch)
    generation.begin()
    yield acted
    generation.begin()


def pure(problem: AttentionProblem, machine: Machine) -> ForwardKernel:
    return select(problem, machine.facts, cuda_choice._tuning_results(), explained=False).kernel


def another(problem: AttentionProblem, machine: Machine) -> ForwardKernel:
    """The best Ampere kernel that is not the chosen one: what a small example may have built."""
    ranked = ranking(problem, machine.facts, cuda_choice._tuning_results())
    return next(
        one.kernel
        for one in ranked
        if family_of(one.kernel).name == "ampere" and one.kernel != ranked[0].kernel
    )


# ---------------------------------------------------------------------- compiling works
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("cache", ["empty", "an Ampere kernel", "everything"])
def test_the_same_kernel_whatever_the_cache_holds(machine, name, cache):
    problem = PROBLEMS[name]
    wanted = pure(problem, machine)
    if cache == "an Ampere kernel":
        machine.built = {another(problem, machine)}
    elif cache == "everything":
        machine.built = {kernel_for(config, problem) for config in default_candidates()} | {wanted}
    built_before = set(machine.built)
    assert machine.explain(problem).kernel == wanted
    assert machine.compiled == []  # explaining builds nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choices.choose(problem, CUDA, None).kernel == wanted
    assert machine.compiled == ([] if wanted in built_before else [wanted])
    assert choices.choose(problem, CUDA, None).kernel == machine.explain(problem).kernel == wanted
    assert len(machine.compiled) <= 1


def test_an_explanation_says_that_the_first_call_will_compile(machine):
    assert "it is not built yet: the first call compiles it" in machine.explain(PLAIN).reason
    choices.choose(PLAIN, CUDA, None)
    assert "not built" not in machine.explain(PLAIN).reason


def test_the_order_of_calls_does_not_matter(machine):
    chosen = []
    for order in itertools.permutations(("plain", "causal", "padded")):
        machine.built.clear()
        generation.begin()
        chosen.append({name: choices.choose(PROBLEMS[name], CUDA, None).kernel for name in order})
    assert all(one == chosen[0] for one in chosen)


# ---------------------------------------------------------------------- compiling is off or impossible
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("why", ["off", "no compiler", "compile error"])
def test_without_compiling_the_best_built_kernel_runs_with_one_warning(machine, name, why):
    problem = PROBLEMS[name]
    ranked = ranking(problem, machine.facts, cuda_choice._tuning_results())
    wanted, worst, better = ranked[0].kernel, ranked[-1].kernel, ranked[len(ranked) // 2]
    machine.built = {worst, better.kernel}
    if why == "compile error":
        machine.broken = True
    else:
        machine.obstacle = "compiling is off" if why == "off" else "no usable nvcc"
    with pytest.warns(RuntimeWarning) as said:
        choice, *again = [choices.choose(problem, CUDA, None) for _ in range(4)]
    assert len(said) == 1
    assert all(one is choice for one in again)
    reason = "no space left on device" if machine.broken else machine.obstacle
    for text in (wanted.short_form(), better.kernel.short_form(), reason):
        assert text in str(said[0].message)
    assert (choice.kernel, choice.n_splits, choice.wanted) == (better.kernel, better.n_splits, wanted)
    explained = machine.explain(problem)
    assert (explained.kernel, explained.n_splits, explained.reason) == (
        choice.kernel, choice.n_splits, choice.reason,
    )  # fmt: skip
    assert reason in explained.reason
    assert explained.rejected[0].kernel == wanted
    assert reason in explained.rejected[0].reason
    assert better.kernel not in {r.kernel for r in explained.rejected}
    assert len(machine.compiled) == (1 if machine.broken else 0)  # a failure is not tried again and again


def test_a_substitute_stays_until_a_new_generation(machine):
    """Else the kernel of a problem would depend on what was called between two of its calls."""
    wanted = pure(PLAIN, machine)
    machine.built, machine.obstacle = {another(PLAIN, machine)}, "compiling is off"
    with pytest.warns(RuntimeWarning):
        first = choices.choose(PLAIN, CUDA, None).kernel
    machine.built |= {one.kernel for one in ranking(PLAIN, machine.facts, cuda_choice._tuning_results())}
    machine.obstacle = None
    assert choices.choose(PLAIN, CUDA, None).kernel == machine.explain(PLAIN).kernel == first != wanted
    assert prepare([PLAIN], CUDA)[0].kernel == wanted
    assert choices.choose(PLAIN, CUDA, None).kernel == machine.explain(PLAIN).kernel == wanted


@pytest.mark.parametrize("broken", [False, True])
def test_where_nothing_is_built_the_error_says_what_to_do(machine, broken):
    machine.broken, machine.obstacle = broken, None if broken else "compiling is off"
    if broken:
        for tries in (1, 2):  # the user may have mended the compiler
            with pytest.raises(KernelCompileError, match="no space left"):
                choices.choose(PLAIN, CUDA, None)
            assert len(machine.compiled) == tries
    else:
        choice = choices.choose(PLAIN, CUDA, None)  # its launch raises KernelNotBuiltError
        assert choice.kernel == pure(PLAIN, machine)
        assert choice.reason.endswith("it is not built, nor is any other: compiling is off")


def test_a_named_configuration_is_never_substituted(machine):
    config = another(PLAIN, machine).config
    machine.obstacle = "compiling is off"
    machine.built = {pure(PLAIN, machine)}
    assert choices.choose(PLAIN, CUDA, config).kernel == kernel_for(config, PLAIN)


# ---------------------------------------------------------------------- generations
def test_an_environment_variable_counts_from_the_next_new_choice_on(machine, monkeypatch, tmp_path):
    first = choices.choose(PLAIN, CUDA, None)
    number = generation.number()
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(tmp_path / "other.sqlite3"))
    assert choices.choose(PLAIN, CUDA, None) is first
    choices.choose(PROBLEMS["causal"], CUDA, None)
    assert generation.number() == number + 1
    assert choices.choose(PLAIN, CUDA, None) is not first
    explain_choice(*[torch.zeros(1, 8, 2, 64, dtype=torch.float16)] * 3)
    assert generation.number() == number + 1
    monkeypatch.setitem(os.environ, "FLASH_ATTENTION_JIT", "0")
    explain_choice(*[torch.zeros(1, 8, 2, 64, dtype=torch.float16)] * 3)
    assert generation.number() == number + 2


def test_results_that_cannot_be_read_are_named_in_the_reason(machine, monkeypatch, tmp_path, capsys):
    """Else the choice would depend on what happened to a file, and nobody could see it."""
    path = tmp_path / "other.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE letters (text)")
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(path))
    prepare([])
    for problem in PROBLEMS.values():
        choices.choose(problem, CUDA, None)
    assert "no tuning results of this machine are used" in machine.explain(PLAIN).reason
    assert capsys.readouterr().err.count("no tuning results of this machine are used") == 1


def test_every_cache_begins_anew_together(machine):
    """A cache that does not take part keeps what an earlier generation found."""
    choices.choose(PLAIN, CUDA, None)
    machine.obstacle, machine.built = "compiling is off", {another(PROBLEMS["causal"], machine)}
    with pytest.warns(RuntimeWarning):
        choices.choose(PROBLEMS["causal"], CUDA, None)
    results = cuda_choice._tuning_results()
    assert choices._choices
    assert availability._obstacles
    assert availability._absent
    generation.begin()
    assert (choices._choices, availability._obstacles, availability._absent) == ({}, {}, set())
    assert cuda_choice._tuning_results() is not results


def test_a_choice_of_an_earlier_generation_is_not_kept(machine, monkeypatch):
    """Another thread begins a generation while this one chooses."""
    real = choices._choice

    def interrupted(*args, **options):
        choice = real(*args, **options)
        generation.begin()
        return choice

    monkeypatch.setattr(choices, "_choice", interrupted)
    choices.choose(PLAIN, CUDA, None)
    assert not choices._choices


def test_another_kernel_is_compiled_where_the_compiler_refuses_one_with_a_mod(machine):
    """Nobody has compiled the user's function before; what was compiled instead stays the choice."""
    mod = trace(None, lambda b, h, q, k: q % 5 >= k % 3).mod
    problem = replace(PLAIN, mod=mod)
    first, second = (one.kernel for one in ranking(problem, machine.facts, None)[:2])
    machine.refused = {first}
    with pytest.warns(RuntimeWarning, match="compiling it failed"):
        choice = choices.choose(problem, CUDA, None)
    assert choice.kernel == second
    assert choices.choose(problem, CUDA, None).kernel == second
    assert machine.compiled == [first, second]
    machine.refused |= {one.kernel for one in ranking(problem, machine.facts, None)}
    generation.begin()
    machine.built.clear()
    machine.compiled.clear()
    with pytest.raises(KernelCompileError):
        choices.choose(problem, CUDA, None)
    assert len(machine.compiled) == 1 + availability.RELIEFS


def test_no_other_kernel_is_compiled_where_one_without_a_mod_fails(machine):
    machine.refused = {pure(PLAIN, machine)}
    with pytest.raises(KernelCompileError):
        choices.choose(PLAIN, CUDA, None)
    assert machine.compiled == [pure(PLAIN, machine)]
