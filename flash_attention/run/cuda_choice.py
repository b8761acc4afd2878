"""The choice on a GPU: what ``select`` says, then what is available. With it come selection and results."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flash_attention.checks.configs import check_fits_facts
from flash_attention.checks.tensors import check_grid
from flash_attention.devices import backend
from flash_attention.run.availability import available
from flash_attention.run.insisted import insisted, named
from flash_helpers import generation
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.candidates import class_reason, numeric_class_of, unable_reason
from flash_helpers.select.chosen import Choice
from flash_helpers.select.select import invariant_class, ranking, select, usable_part, with_slots


def choice_on(
    problem: AttentionProblem, device: torch.device, config: KernelConfig | None, explained: bool
) -> Choice:
    """What runs a problem on a GPU that is there.

    Args:
        problem: the problem.
        device: the GPU.
        config: the configuration that the caller insists on; None: choose.
        explained: judge all other candidates too, and build nothing.

    Raises:
        As ``choices.choose``.
    """
    facts = backend("cuda").device_facts_of(device)
    choice = choice_for(problem, facts, str(device), config, explained)
    if config is None:
        choice = available(
            choice, lambda: ranking(problem, facts, _tuning_results()), device, build=not explained
        )
        choice = with_slots(choice, usable_part(problem, facts)[1])
    return choice


def choice_for(
    problem: AttentionProblem, facts: DeviceFacts, where: str, config: KernelConfig | None, explained: bool
) -> Choice:
    """The choice for a GPU, which need not be there, whatever is built.

    Args:
        where: the GPU's name, for messages.
    """
    if config is None:
        results = _tuning_results()
        choice = select(problem, facts, results, explained=explained)
        if results.trouble:
            choice = replace(choice, reason=f"{choice.reason}; {results.trouble}")
    else:
        asked, _ = usable_part(problem, facts)
        obstacle = unable_reason(config, asked, [config])
        if asked.invariant and obstacle is None:
            obstacle = class_reason(numeric_class_of(config), invariant_class(asked, facts))
        choice = insisted(asked, config, obstacle)
        if asked.invariant:
            choice = replace(choice, numeric_class=numeric_class_of(config))
        if asked != problem:
            choice = replace(choice, problem=asked)
        check_fits_facts(config, facts, where, named(problem), choice.kernel.traits)
    seen = choice.problem or problem
    check_grid(seen.batch, seen.n_heads, seen.seq_len_q, choice.kernel.config.B_r)
    if problem.direction != FORWARD:
        check_grid(seen.batch, seen.n_heads_kv, seen.seq_len_k, choice.kernel.config.B_c, "key", "B_c")
    return choice


@lru_cache(1)
def _tuning_results() -> TuningResults:
    """The user's results and those that ship, as this generation has read them."""
    return TuningResults()


generation.forgets(_tuning_results.cache_clear)
