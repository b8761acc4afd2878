"""What was measured of one kernel, and reading it from rows that may be damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_helpers.content import ContentError, amount, parse_json
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket

SCREENED, ELIMINATED, FINAL = "screened", "eliminated", "final"
_STATES, _STAGES = ("ok", "wrong", "failed"), (SCREENED, ELIMINATED, FINAL)

VALUES = ("status", "reason", "stage", "milliseconds", "p20", "p80", "rounds", "error", "problem", "facts")
"""The columns of a row behind its key."""


@dataclass(frozen=True)
class Measurement:
    """What is known of one kernel in one bucket.

    Attributes:
        kernel: its short form.
        problem: the sizes it ran on.
        status: ``ok``, ``wrong`` or ``failed``.
        reason: why it is not ``ok``.
        stage: ``screened`` (to be measured more), ``eliminated`` (slower than half of the others), or
            ``final`` (measured together with the best).
        milliseconds, p20, p80: of a call, over ``rounds`` measurements; None when it was not timed.
        rounds: number of measurements.
        error: relative error against the float32 reference.
        facts: torch, CUDA, commit, time of the measurement.
    """

    kernel: str
    problem: Problem
    status: str = "ok"
    reason: str = ""
    stage: str = SCREENED
    milliseconds: float | None = None
    p20: float | None = None
    p80: float | None = None
    rounds: int = 0
    error: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        """10^12 FLOP a second by the median time."""
        return self.problem.flop() / self.milliseconds / 1e9 if self.milliseconds else None

    @property
    def done(self) -> bool:
        """Whether it needs no further measurement."""
        return self.status != "ok" or self.stage != SCREENED


def row_measurement(row: Sequence[Any]) -> Measurement:
    """The measurement in a row of (kernel, *VALUES). Raises one of ``CONTENT_ERRORS`` where it is damaged."""
    values = dict(zip(("kernel", *VALUES), row, strict=True))
    problem, facts = (parse_json(values.pop(name)) for name in ("problem", "facts"))
    found = Measurement(problem=Problem.from_json(problem), facts=facts, **values)
    for number in (found.milliseconds, found.p20, found.p80, found.error, found.tflops):
        amount(0 if number is None else number)
    texts = (found.kernel, found.reason)
    sound = (
        found.status in _STATES
        and found.stage in _STAGES
        and isinstance(found.rounds, int)
        and isinstance(facts, dict)
        and all(isinstance(text, str) for text in texts)
        and found.milliseconds != 0
    )
    if not sound:
        raise ContentError("the row holds what no measurement gives")
    return found


def row_bucket(row: Sequence[Any]) -> Bucket:
    """The bucket in a row of its fields. Raises one of ``CONTENT_ERRORS`` where it is damaged."""
    dtype, d_head, causal, *rest = row
    if causal not in (0, 1):
        raise ContentError(f"causal is {causal!r}")
    return Bucket(DType.from_string(dtype), d_head, bool(causal), *rest)
