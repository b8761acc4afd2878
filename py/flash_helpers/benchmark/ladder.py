"""What each step of a ladder of configurations gained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from flash_helpers.benchmark.results import Row
from flash_helpers.benchmark.table import ratio_to_best_peer, shown_rate


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kernel: the row's implementation: its short form.
        tflops: None when it was not timed.
        over_step_before: ratio to the last step that was timed; None for the first.
        over_peer: ratio to the best peer on the same problem.
        reason: why it was not timed.
    """

    kernel: str
    tflops: float | None
    over_step_before: float | None
    over_peer: float | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ladder_steps(names: Iterable[str], rows: Sequence[Row], mode: str = "hot") -> list[Step]:
    """The steps in order.

    Args:
        names: short forms of the kernels, the first step first.
        rows: of one problem and card: the steps, and peers to compare with.
        mode: which timing.
    """
    by_name = {row.implementation: row for row in rows}
    steps: list[Step] = []
    previous: float | None = None
    for name in names:
        row = by_name.get(name)
        if row is None:
            steps.append(Step(name, None, None, None, "not measured"))
            continue
        rate = row.tflops(mode)
        gain = rate / previous if rate and previous else None
        reason = "" if rate else f"{row.status}: {row.reason}"
        steps.append(Step(name, rate, gain, ratio_to_best_peer(row, rows, mode), reason))
        previous = rate or previous
    return steps


def ladder_table(steps: Sequence[Step], ideas: Sequence[str], title: str) -> Table:
    """The steps as a table, each with what it adds."""
    table = Table("step", "idea", title=title, title_justify="left")
    for heading in ("TFLOP/s", "/ step before", "/ best peer"):
        table.add_column(heading, justify="right")
    for number, (idea, step) in enumerate(zip(ideas, steps, strict=True), start=1):
        gain = f"{step.over_step_before:.3f}" if step.over_step_before else ""
        peer = f"{step.over_peer:.3f}" if step.over_peer else ""
        rate = shown_rate(step.tflops) if step.tflops else step.reason
        table.add_row(str(number), Text(idea), rate, gain, peer)
    return table
