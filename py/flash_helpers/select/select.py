"""Which kernel computes a problem, and why: a pure function of problem, device facts and tuning results.

No GPU is asked and nothing is built, so that a choice can be explained and tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.select.candidates import (
    default_candidates,
    head_sizes,
    kernel_for,
    split_variant,
    unable_reason,
)
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.family_choices import MeasuredChoice, measured_choices
from flash_helpers.select.prediction import Prediction, predict
from flash_helpers.select.problem import AttentionProblem

# A built kernel runs in place of a better one that would have to be compiled first, if it is expected to
# take at most this many times as long.
GOOD_ENOUGH = 1.5


class TuningDatabase(Protocol):
    """Measured results."""

    def ranked(
        self, problem: AttentionProblem, facts: DeviceFacts, chosen: ForwardConfig | None = None
    ) -> list[tuple[ForwardConfig, str]]:
        """What was measured for such a problem on such a device to be no slower than ``chosen``, and how it
        is known; the quickest first."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, and why not."""

    kernel: ForwardKernel
    reason: str


@dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        kernel: the kernel.
        reason: why this one.
        rejected: all other candidates; those that could have run come first, the nearest one first. Empty
            where they were not asked for.
        n_splits: parts that the keys are cut into; 1 unless the kernel has the trait ``split``.
        problem: what the kernel computes, where a single query's heads have become rows or its hidden keys
            are left out; None: the problem as it was given.
        fused: on the CPU, PyTorch's own fused attention runs in the kernel's place, where scores are finite.
    """

    kernel: ForwardKernel
    reason: str
    rejected: tuple[Rejected, ...] = ()
    n_splits: int = 1
    problem: AttentionProblem | None = None
    fused: bool = False

    @cached_property
    def is_plain(self) -> bool:
        """Whether the kernel has no feature but, perhaps, a causal mask. Asked by every call."""
        traits = self.kernel.traits
        return traits == ForwardTraits(causal=traits.causal)

    @cached_property
    def head_sizes(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and O, of the kernel. Asked by every call."""
        return head_sizes(self.kernel.config)

    def __str__(self) -> str:
        lines = [f"{self.kernel.short_form()}\n  because {self.reason}"]
        lines += [f"not {r.kernel.short_form()}\n  because {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def select(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None = None,
    *,
    candidates: Iterable[ForwardConfig] | None = None,
    is_built: Callable[[ForwardKernel], bool] = lambda kernel: True,
    may_build: Callable[[], bool] = lambda: True,
    explained: bool = True,
) -> Choice:
    """Chooses a kernel: what tuning found, else the family's measured choice, else what the model expects.

    Args:
        problem: what to compute.
        facts: the device.
        database: tuning results, which come first; None: there are none.
        candidates: configurations to choose from; None: those that are built ahead of time and each
            family's measured choice.
        is_built: whether a kernel is there already; a good one that is comes before a better one that is not.
        may_build: whether a kernel that is not there can be compiled; else any built one will do.
        explained: also judge all other candidates, which takes milliseconds.

    Raises:
        NoKernelError: no candidate can compute it; the message has the reasons.
    """
    given, problem = problem, problem.with_rows_packed()
    measured = measured_choices(problem, facts) if candidates is None else []
    ahead = _known_best(problem, facts, database, measured, candidates)
    known = ahead[0] if ahead else None
    seen_as = None if problem == given else problem
    if known is not None and not explained and is_built(known[0]):
        return Choice(known[0], known[1], n_splits=known[2], problem=seen_as)

    predictions, rejected = _predictions(problem, facts, measured, ahead, candidates)
    if not predictions:
        raise NoKernelError(_nothing_fits(given, facts, rejected))
    ranked = sorted(predictions, key=lambda kernel: predictions[kernel].seconds)
    fastest = predictions[ranked[0]]
    if known is None:
        best, basis = ranked[0], f"{fastest.text()}, the least of {len(ranked)} by the model"
    else:
        best, basis = known[:2]

    chosen, reason = best, basis
    if not is_built(best):
        limit = GOOD_ENOUGH * max(predictions[best].seconds, fastest.seconds)
        if not may_build():
            limit = float("inf")
        # What was measured to be next best comes before what the model says of others.
        built = next((kernel for kernel, _, _ in ahead if is_built(kernel)), None) or next(
            (k for k in ranked if predictions[k].seconds <= limit and is_built(k)), None
        )
        if built is None:
            reason += "; it is not built yet, and no built one comes near it"
        else:
            chosen = built
            reason = (
                f"it is built, while {best.short_form()} ({basis}) would have to be compiled first: "
                "prepare() does that ahead of time"
            )
    others = []
    for kernel in ranked:
        if kernel == best != chosen:
            others.append(Rejected(kernel, "it is not built yet"))
        elif kernel != chosen:
            others.append(Rejected(kernel, predictions[kernel].against(predictions[chosen])))
    # What was not built and would be best is what the reader wants to see first.
    others.sort(key=lambda other: other.kernel != best)
    return Choice(chosen, reason, (*others, *rejected), predictions[chosen].n_splits, seen_as)


def _known_best(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None,
    measured: Sequence[MeasuredChoice],
    candidates: Iterable[ForwardConfig] | None,
) -> list[tuple[ForwardKernel, str, int]]:
    """Kernels, reasons and parts by measurement, the best first; empty: none that could compute it.

    Tuning times kernels without features that take all keys in one go: it is asked about no others, nor
    where parts of the keys fill the GPU. A family's choice gives way only to what was measured beside it.
    """
    usable = next((choice for choice in measured if choice.obstacle is None), None)
    known: list[tuple[ForwardKernel, str, int]] = []
    plain = not any(on for name, on in problem.features().items() if name != "causal")
    if database is not None and plain and (usable is None or usable.n_splits == 1):
        chosen = None if usable is None else usable.kernel.config
        for config, basis in database.ranked(problem, facts, chosen):
            if _can(config, problem, facts, candidates):
                text = "measured to be among the quickest" if known else "measured to be the quickest"
                known.append((kernel_for(config, problem), f"{text}: {basis}", 1))
    if known or usable is None:
        return known
    family = family_of(usable.kernel).name
    reason = f"the choice of the {family} family for such problems: {usable.reason}"
    if usable.n_splits > 1:
        reason += f"; keys in {usable.n_splits} parts, so that their blocks fill the GPU"
    for choice in measured[: measured.index(usable)]:
        reason += f"; {family_of(choice.kernel).name} kernels cannot: {choice.obstacle}"
    return [(usable.kernel, reason, usable.n_splits)]


def _can(
    config: ForwardConfig,
    problem: AttentionProblem,
    facts: DeviceFacts,
    candidates: Iterable[ForwardConfig] | None,
) -> bool:
    if candidates is not None and config not in list(candidates):
        return False
    return not (unable_reason(config, problem, [config]) or config.infeasible_reason(facts))


def _predictions(
    problem: AttentionProblem,
    facts: DeviceFacts,
    measured: Sequence[MeasuredChoice],
    known: Sequence[tuple[ForwardKernel, str, int]],
    candidates: Iterable[ForwardConfig] | None,
) -> tuple[dict[ForwardKernel, Prediction], list[Rejected]]:
    """The expected time of every kernel that can compute the problem, and the others with their reasons."""
    configs = list(default_candidates() if candidates is None else candidates)
    able: dict[ForwardKernel, Prediction] = {}
    rejected = {}
    for config in configs:
        kernel = kernel_for(config, problem)
        if reason := unable_reason(config, problem, configs) or config.infeasible_reason(facts):
            rejected[kernel] = Rejected(kernel, reason)
            continue
        able[kernel] = predict(kernel, problem, facts)
        if (split := split_variant(kernel)) is not None:
            prediction = predict(split, problem, facts)
            if prediction.n_splits > 1:
                able[split] = prediction
    for choice in measured:
        if choice.obstacle is None:
            for kernel in (choice.kernel, kernel_for(choice.kernel.config, problem)):
                able[kernel] = predict(kernel, problem, facts)
        else:
            rejected[choice.kernel] = Rejected(choice.kernel, choice.obstacle)
    for kernel, _, _ in known:
        able[kernel] = predict(kernel, problem, facts)
    return able, [r for kernel, r in rejected.items() if kernel not in able]


def _nothing_fits(problem: AttentionProblem, facts: DeviceFacts, rejected: Sequence[Rejected]) -> str:
    reasons = list(dict.fromkeys(r.reason for r in rejected))
    listed = "".join(f"\n  {reason}" for reason in reasons) or "\n  there are no candidates"
    return (
        f"no kernel computes {problem.label()} on {facts.name}. Reasons of the {len(rejected)} "
        f"candidates:{listed}\nCPU tensors take every feature and head size"
    )
