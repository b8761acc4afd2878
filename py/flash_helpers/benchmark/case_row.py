"""The outcome of one case: everybody's output is checked, the times of those that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flash_helpers.benchmark.cases import Case, expected_output, make_inputs
from flash_helpers.benchmark.contestants import CONTESTANTS, OURS, Contestant
from flash_helpers.benchmark.measuring import Measured, measure_checked
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.result_file import CHOICE, FORWARD
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import Timing

PEERS = {contestant.name for contestant in CONTESTANTS} - {OURS}


@dataclass
class CaseRow:
    """What was measured on one case.

    Attributes:
        case: what was computed.
        mode: of the timings, a name of ``plan.MODES``.
        measured: by contestant.
    """

    case: Case
    mode: str
    measured: dict[str, Measured] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[str, Timing]:
        """Times of one call, of all who were timed."""
        return {name: m.timings[self.mode] for name, m in self.measured.items() if self.mode in m.timings}

    @property
    def kernel(self) -> str:
        """Short form of what this library ran; empty: nothing."""
        return self.measured[OURS].kernel if OURS in self.measured else ""

    def over(self, name: str, other: str) -> float | None:
        """Time of one contestant by that of another; None: one has none."""
        mine, theirs = self.milliseconds.get(name), self.milliseconds.get(other)
        return mine.median / theirs.median if mine and theirs else None

    def cell(self, name: str) -> str:
        """For tables: time over ours, what it is instead of right, or a dash where it is not there."""
        if (ratio := self.over(name, OURS)) is not None:
            return f"{ratio:.2f}"
        one = self.measured.get(name)
        return "-" if one is None or one.status in ("ok", "unavailable") else one.status

    def remarks(self) -> list[str]:
        """A line for everybody who has no time."""
        return [
            f"{one.status}  {name}: {one.reason}"
            + (f" ({self.case.label()})" if one.status == "wrong" else "")
            for name, one in self.measured.items()
            if one.status != "ok"
        ]

    def to_rows(self) -> list[dict[str, Any]]:
        """Rows of a result file, one for each contestant."""
        return [self._row(name, one) for name, one in self.measured.items()]

    def _row(self, name: str, one: Measured) -> dict[str, Any]:
        row = {
            "implementation": CHOICE if name == OURS else name,
            "kind": "peer" if name in PEERS else "kernel",
            "feature": self.case.feature,
            "problem": self.case.to_json(),
            "milliseconds": {mode: timing.to_json() for mode, timing in one.timings.items()},
        }
        said = {
            "status": one.status if one.status != "ok" else "",
            "reason": one.reason,
            "error": one.error,
            "kernel": one.kernel,
            "direction": self.case.direction if self.case.direction != FORWARD else "",
        }
        return row | {name: value for name, value in said.items() if value not in ("", None)}


def measure_case(
    case: Case,
    mode: str,
    contestants: Sequence[Contestant],
    device: torch.device,
    rounds: int,
    seconds: float | None = None,
) -> CaseRow:
    """Checks everybody's output against the reference and times those that are right, in turns.

    Args:
        case: what to compute.
        mode: a name of ``plan.MODES`` that the device's timer has.
        contestants: who.
        device: where.
        rounds: measurements of each.
        seconds: no round begins later than this after the first one; None: there are all of them.

    Raises:
        DeviceLostError: a kernel broke the CUDA context.
    """
    x = make_inputs(case, device)
    measured = measure_checked(
        {contestant.name: partial(contestant.prepare, case, x) for contestant in contestants},
        lambda: expected_output(case, x),
        case.dtype,
        device,
        timer_for(device),
        Plan(rounds, (mode,), seconds=seconds),
        case.label(),
    )
    return CaseRow(case, mode, measured)


def names_to_show(rows: Sequence[CaseRow], contestants: Sequence[Contestant]) -> list[str]:
    """Names, in order, of the others of which a table of ``rows`` has something to say."""
    return [c.name for c in contestants if c.name != OURS and any(r.cell(c.name) != "-" for r in rows)]
