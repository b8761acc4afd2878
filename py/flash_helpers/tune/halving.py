"""Successive halving: many candidates measured a little, the better half of them more, the best thoroughly.

All that are left are measured in turn, in random order (``timing.alternate``): a drift of the clock hits
them alike, and what is compared was always measured at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flash_helpers.benchmark.timing import Measure, TimedCall, Timing, alternate
from flash_helpers.tune.database import ELIMINATED, FINAL, SCREENED


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        first_rounds: measurements of each candidate in the first stage; they double with each stage.
        finalists: so many or fewer are measured to the end.
        final_rounds: measurements of each finalist.
        seed: of the orders and the inputs.
    """

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
    on_result: Callable[[StageResult], None],
    out_of_time: Callable[[], bool] = lambda: False,
) -> bool:
    """Measures until the finalists are ranked.

    Args:
        calls: name to call, estimated already.
        measure: measures one call once, milliseconds.
        plan: how much.
        on_result: told of each candidate's result as soon as its stage is over.
        out_of_time: asked after each round; True ends it with what there is, which stays ``screened``.

    Returns:
        Whether it came to its end.
    """
    alive, rounds, number = dict(calls), plan.first_rounds, 0
    while alive:
        last = len(alive) <= plan.finalists
        if last:
            rounds = max(rounds, plan.final_rounds)
        samples, failures = alternate(alive, measure, rounds, seed=plan.seed + number, deadline=out_of_time)
        for name, error in failures.items():
            on_result(StageResult(name, None, SCREENED, error))
        timings = {name: Timing.of(values, alive[name].launch_hidden) for name, values in samples.items()}
        ranked = sorted(timings, key=lambda name: timings[name].median)
        stopped = out_of_time()
        complete = all(len(values) == rounds for values in samples.values())
        if stopped and not (last and complete):
            for name in ranked:
                on_result(StageResult(name, timings[name], SCREENED))
            return False
        kept = [] if last else ranked[: max(plan.finalists, len(ranked) // 2)]
        for name in ranked:
            stage = FINAL if last else SCREENED if name in kept else ELIMINATED
            on_result(StageResult(name, timings[name], stage))
        alive = {name: alive[name] for name in kept}
        rounds, number = 2 * rounds, number + 1
    return True
