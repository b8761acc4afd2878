"""Successive halving: many candidates measured a little, the better half of them more, the best thoroughly.

All that are left are measured in turn, in random order (``timing.alternate``): a drift of the clock hits
them alike, and what is compared was always measured at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flash_helpers.benchmark.timing import Measure, TimedCall, Timing, alternate
from flash_helpers.results.measurement import ELIMINATED, FINAL, SCREENED


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        slow: a candidate whose first rough time is this many times the best one's is measured no further.
        first_rounds: measurements of each candidate in the first stage; they double with each stage.
        finalists: so many or fewer are measured to the end.
        final_rounds: measurements of each finalist, and the most of any candidate in one stage.
        seed: of the orders and the inputs.
    """

    slow: float = 1.5
    first_rounds: int = 2
    finalists: int = 4
    final_rounds: int = 11
    seed: int = 0


@dataclass(frozen=True)
class StageResult:
    """One candidate after one stage.

    Attributes:
        name: the candidate.
        timing: of this stage alone; None when it raised.
        stage: ``screened``, ``eliminated`` or ``final``.
        failure: what it raised.
    """

    name: str
    timing: Timing | None
    stage: str
    failure: Exception | None = None


def successive_halving(
    calls: Mapping[str, TimedCall],
    measure: Measure,
    plan: Plan,
    on_stage: Callable[[list[StageResult]], None],
    out_of_time: Callable[[], bool] = lambda: False,
    only_first_stage: bool = False,
) -> bool:
    """Measures until the finalists are ranked.

    Args:
        calls: name to call, estimated already.
        measure: measures one call once, milliseconds.
        plan: how much.
        on_stage: told of the results of a stage as soon as it is over.
        out_of_time: asked after each round; True ends it with what there is, which stays ``screened``.
        only_first_stage: end after it, though the better half may still be ``screened``.

    Returns:
        Whether it came to its end.
    """
    alive, rounds, number = _without_slow(calls, plan, on_stage), plan.first_rounds, 0
    while alive:
        last = len(alive) <= plan.finalists
        if last:
            rounds = max(rounds, plan.final_rounds)
        samples, failures = alternate(alive, measure, rounds, seed=plan.seed + number, deadline=out_of_time)
        results = [StageResult(name, None, SCREENED, error) for name, error in failures.items()]
        timings = {name: Timing.of(values, alive[name].launch_hidden) for name, values in samples.items()}
        ranked = sorted(timings, key=lambda name: timings[name].median)
        stopped = out_of_time()
        complete = all(len(values) == rounds for values in samples.values())
        if stopped and not (last and complete):
            on_stage(results + [StageResult(name, timings[name], SCREENED) for name in ranked])
            return False
        kept = [] if last else ranked[: max(plan.finalists, len(ranked) // 2)]
        for name in ranked:
            stage = FINAL if last else SCREENED if name in kept else ELIMINATED
            results.append(StageResult(name, timings[name], stage))
        on_stage(results)
        if only_first_stage:
            break
        alive = {name: alive[name] for name in kept}
        rounds, number = min(2 * rounds, plan.final_rounds), number + 1
    return True


def _without_slow(
    calls: Mapping[str, TimedCall], plan: Plan, on_stage: Callable[[list[StageResult]], None]
) -> dict[str, TimedCall]:
    """The calls whose estimate comes near the best one's; the others are told with that estimate."""
    limit = plan.slow * min((timed.milliseconds for timed in calls.values()), default=0.0)
    slow = [name for name, timed in calls.items() if timed.milliseconds > limit]
    if slow:
        on_stage([StageResult(name, Timing.of([calls[name].milliseconds]), ELIMINATED) for name in slow])
    return {name: timed for name, timed in calls.items() if name not in slow}
