"""Which kernel computes a problem, and why: a pure function of problem, device facts and tuning results.

No GPU is asked, nothing is built, and what is built has no influence: a choice can be explained and tested
anywhere, and is the same in every process. What runs where the chosen kernel cannot be built is decided
afterwards (``availability``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of, family_of, kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import (
    class_reason,
    default_candidates,
    is_planned,
    kernel_for,
    numeric_class_of,
    size_reason,
    split_variant,
    unable_reason,
)
from flash_helpers.select.chosen import Choice, Rejected
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.family_choices import FamilyChoice, family_choices
from flash_helpers.select.prediction import Expected, Prediction, expected, resident_blocks


class TuningDatabase(Protocol):
    """Measured results."""

    def ranked(
        self, problem: AttentionProblem, facts: DeviceFacts, chosen: KernelConfig | None = None
    ) -> list[tuple[KernelConfig, str]]:
        """The configurations measured for such a problem on such a device, beside ``chosen``, each with how
        fast it was, in the order to take them in."""


def select(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None = None,
    *,
    candidates: Iterable[KernelConfig] | None = None,
    explained: bool = True,
) -> Choice:
    """Chooses a kernel: what tuning found, else the family's default, else what the model expects.

    Args:
        problem: what to compute.
        facts: the device.
        database: tuning results, which come first; None: there are none.
        candidates: configurations to choose from; None: those that are built ahead of time and each
            family's default.
        explained: also judge all other candidates, which takes milliseconds.

    Raises:
        NoKernelError: no candidate can compute it; the message has the reasons.
    """
    if not explained:
        seen, part = usable_part(problem, facts)
        seen = seen.with_rows_packed()
        defaults = family_choices(seen, part) if candidates is None else []
        if known := _known_best(seen, part, database, defaults, candidates):
            return replace(known[0], problem=None if seen == problem else seen)
        # The whole device: of its own part, a limit would be none.
        return replace(ranking(problem, facts, database, candidates=candidates)[0], rejected=())
    return ranking(problem, facts, database, candidates=candidates)[0]


def ranking(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None = None,
    *,
    candidates: Iterable[KernelConfig] | None = None,
) -> list[Choice]:
    """Every kernel that can compute a problem, the one to choose first; each as if it were chosen.

    What was measured or is a family's default comes before what the model expects, the quickest first. Only
    the first has ``rejected``, and there all others with the reasons against them.

    Args, Raises: as for ``select``.
    """
    given = problem
    problem, facts = usable_part(problem, facts)
    problem = problem.with_rows_packed()
    candidates = None if candidates is None else list(candidates)
    defaults = family_choices(problem, facts) if candidates is None else []
    known = _known_best(problem, facts, database, defaults, candidates)
    predictions, unable = _predictions(problem, facts, defaults, known, candidates)
    if not predictions:
        raise NoKernelError(_nothing_fits(given, facts, unable))

    ranked = {choice.kernel: choice for choice in known}
    for kernel in sorted(predictions, key=lambda kernel: predictions[kernel].seconds):
        reason = predictions[kernel].text()
        if isinstance(predictions[kernel], Prediction):
            reason += f", the least of {len(predictions)} by the model"
        ranked.setdefault(kernel, Choice(kernel, reason, n_splits=predictions[kernel].n_splits))
    first, *others = ranked.values()
    measured = {choice.kernel: choice.reason for choice in known}
    rejected = [
        Rejected(
            other.kernel,
            measured.get(other.kernel) or predictions[other.kernel].against(predictions[first.kernel]),
        )
        for other in others
    ]
    configs = [kernel.config for kernel in (*predictions, *(r.kernel for r in unable))]
    unable.sort(key=lambda r: size_reason(r.kernel.config, problem, configs) is not None)
    seen_as = None if problem == given else problem
    first = replace(first, rejected=(*rejected, *unable))
    return [replace(choice, problem=seen_as) for choice in (first, *others)]


def usable_part(problem: AttentionProblem, facts: DeviceFacts) -> tuple[AttentionProblem, DeviceFacts]:
    """The device as the problem may use it, and the problem without a limit that is none there."""
    if problem.n_sms is None:
        return problem, facts
    if problem.n_sms >= facts.sm_count:
        return replace(problem, n_sms=None), facts
    return problem, facts.limited_to(problem.n_sms)


def with_slots(choice: Choice, facts: DeviceFacts) -> Choice:
    """A choice that says how many thread blocks of a planned kernel run at a time on the device."""
    if not is_planned(choice.kernel):
        return choice
    per_sm = max(resident_blocks(choice.kernel.config, facts), 1)
    return replace(choice, slots=facts.sm_count * per_sm)


def _known_best(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None,
    defaults: Sequence[FamilyChoice],
    candidates: Iterable[KernelConfig] | None,
) -> list[Choice]:
    """What is known without the model, the best first: the measured kernels that can run, or the default.

    Tuning times kernels without features that take all keys in one go, on all SMs: it is asked about no
    others, nor where parts of the keys fill the GPU.
    """
    usable = next((choice for choice in defaults if choice.obstacle is None), None)
    known: list[Choice] = []
    plain = not any(on for name, on in problem.features().items() if name != "causal")
    plain = plain and not (problem.out_float32 or problem.invariant or problem.has_mod)
    plain = plain and problem.n_sms is None
    if database is not None and plain and (usable is None or usable.n_splits == 1):
        default = None if usable is None else usable.kernel.config
        for config, basis in database.ranked(problem, facts, default):
            if _can(config, problem, facts, candidates):
                text = "measured beside it" if known else "measured to be the quickest"
                known.append(Choice(kernel_for(config, problem), f"{text}: {basis}"))
    if known or usable is None:
        return known
    family = family_of(usable.kernel).name
    reason = f"the default of the {family} family for such problems: {usable.reason}"
    if problem.invariant:
        reason = f"of the {family} family's one numeric class for this head size: {usable.reason}"
    if usable.n_splits > 1:
        reason += f"; keys in {usable.n_splits} parts, so that their blocks fill the GPU"
    # A family that would cut the keys into parts has two choices, and mostly one obstacle.
    before = ((family_of(c.kernel).name, c.obstacle) for c in defaults[: defaults.index(usable)])
    for name, obstacle in dict.fromkeys(before):
        reason += f"; not the {name} family's kernel: {obstacle}"
    return [Choice(usable.kernel, reason, n_splits=usable.n_splits, numeric_class=_class_of(usable, problem))]


def _class_of(choice: FamilyChoice, problem: AttentionProblem) -> NumericClass | None:
    """The numeric class of a choice; None: the problem asks for none."""
    return numeric_class_of(choice.kernel.config) if problem.invariant else None


def invariant_class(problem: AttentionProblem, facts: DeviceFacts) -> NumericClass:
    """The one numeric class that a device computes problems like this one in, with ``numerics="invariant"``.

    Raises:
        NoKernelError: no family runs on the device.
    """
    for choice in family_choices(problem, facts):
        return numeric_class_of(choice.kernel.config)
    raise NoKernelError(_nothing_fits(problem, facts, _predictions(problem, facts, [], [], None)[1]))


def _can(
    config: KernelConfig,
    problem: AttentionProblem,
    facts: DeviceFacts,
    candidates: Iterable[KernelConfig] | None,
) -> bool:
    if candidates is not None and config not in list(candidates):
        return False
    return not (unable_reason(config, problem, [config]) or config.infeasible_reason(facts))


def _predictions(
    problem: AttentionProblem,
    facts: DeviceFacts,
    defaults: Sequence[FamilyChoice],
    known: Sequence[Choice],
    candidates: Iterable[KernelConfig] | None,
) -> tuple[dict[Kernel, Expected], list[Rejected]]:
    """The expected time of every kernel that can compute the problem, and the others with their reasons."""
    configs = list(default_candidates(problem.direction) if candidates is None else candidates)
    able: dict[Kernel, Expected] = {}
    rejected = {}
    for config in configs:
        fits = direction_of(config).name == problem.direction
        kernel = kernel_for(config, problem) if fits else kernel_of(config)
        reason = unable_reason(config, problem, configs) or config.infeasible_reason(facts)
        if reason is None and problem.invariant and defaults:
            reason = class_reason(numeric_class_of(config), numeric_class_of(defaults[0].kernel.config))
        if reason:
            rejected[kernel] = Rejected(kernel, reason)
            continue
        able[kernel] = expected(kernel, problem, facts)
        if not problem.invariant and (split := split_variant(kernel)) is not None:
            prediction = expected(split, problem, facts)
            if prediction.n_splits > 1:
                able[split] = prediction
    for choice in defaults:
        if choice.obstacle is None:
            for kernel in (choice.kernel, kernel_for(choice.kernel.config, problem)):
                able[kernel] = expected(kernel, problem, facts)
        else:
            rejected[choice.kernel] = Rejected(choice.kernel, choice.obstacle)
    for chosen in known:
        able[chosen.kernel] = expected(chosen.kernel, problem, facts)
    return able, [r for kernel, r in rejected.items() if kernel not in able]


def _nothing_fits(problem: AttentionProblem, facts: DeviceFacts, rejected: Sequence[Rejected]) -> str:
    """What stands against the candidates for the tensors' type and head size, and the numeric class that is
    wanted; against others their type, size or class does, which is no news."""
    configs = [r.kernel.config for r in rejected]
    near = [r for r in rejected if not size_reason(r.kernel.config, problem, configs)]
    which, advice = " for this element type and head size" if near else "", ""
    if problem.invariant and near and (own := family_choices(problem, facts)):
        wanted = numeric_class_of(own[0].kernel.config)
        near = [r for r in near if numeric_class_of(r.kernel.config) == wanted] or near
        which += " of the numeric class that numerics='invariant' takes"
        advice = "Leave numerics away, and kernels of other classes may run. "
    told = near or rejected
    reasons = list(dict.fromkeys(r.reason for r in told))
    listed = "".join(f"\n  {reason}" for reason in reasons) or "\n  there are none"
    kernels = "kernel" if len(told) == 1 else f"{len(told)} kernels"
    return (
        f"no kernel computes {problem.label()} on {facts.name}. Against the {kernels}{which}:{listed}\n"
        f"{advice}CPU tensors take every feature and head size"
    )
