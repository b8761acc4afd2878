"""Which kernels could compute a problem on a device, which one would, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from flash_helpers.explain.floors import Floors, floors, matrix_share, work
from flash_helpers.explain.resources import Occupancy, occupancy, predict_registers
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.problem import Problem
from flash_helpers.results.lookup import TunedBucket, TunedKernel
from flash_helpers.select.choice import able_kernels

SHOWN = 6  # candidates of the table; --json has all


class RejectedKernel(Protocol):
    """A kernel that is not chosen, and why."""

    @property
    def kernel(self) -> ForwardKernel: ...
    @property
    def reason(self) -> str: ...


class ChosenKernel(Protocol):
    """What selection says."""

    @property
    def kernel(self) -> ForwardKernel: ...
    @property
    def reason(self) -> str: ...
    @property
    def rejected(self) -> Sequence[RejectedKernel]: ...


@dataclass(frozen=True)
class Candidate:
    """A kernel that can compute the problem on the device.

    Attributes:
        kernel: the kernel.
        chosen: whether it is the one.
        reason: why, or why not.
        occupancy, floors: by the predicted registers; milliseconds.
        attainable_tflops: FLOP of the problem over the longest floor.
        measured: from the tuning results, if it was measured on such a problem.
    """

    kernel: ForwardKernel
    chosen: bool
    reason: str
    occupancy: Occupancy
    floors: Floors
    attainable_tflops: float
    measured: TunedKernel | None


@dataclass(frozen=True)
class ProblemExplanation:
    """Everything that ``flash-attention explain`` shows of a problem.

    Attributes:
        problem, device: what it is about.
        reason: why the chosen kernel is chosen.
        candidates: the chosen one first, then those measured beside it, the fastest first, then as selection
            ranks them.
        unable: why other kernels can't compute it at all, with how many share the reason.
        measured_as: the bucket of the measured times, and where they are from; empty: none.
    """

    problem: Problem
    device: DeviceFacts
    reason: str
    candidates: tuple[Candidate, ...]
    unable: dict[str, int]
    measured_as: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "problem": self.problem.to_json(),
            "device": asdict(self.device),
            "chosen": self.candidates[0].kernel.short_form(),
            "reason": self.reason,
            "candidates": [
                {
                    "kernel": c.kernel.short_form(),
                    "chosen": c.chosen,
                    "reason": c.reason,
                    "occupancy": c.occupancy.to_json(),
                    "floors_ms": asdict(c.floors),
                    "attainable_tflops": c.attainable_tflops,
                    "measured": asdict(c.measured) if c.measured else None,
                }
                for c in self.candidates
            ],
            "unable": self.unable,
            "measured_as": self.measured_as,
        }


def explain_problem(
    problem: Problem, facts: DeviceFacts, choice: ChosenKernel, measured: TunedBucket | None = None
) -> ProblemExplanation:
    """Puts together what selection says and what is known of each candidate; needs no GPU.

    Args:
        problem: the sizes.
        facts: the device.
        choice: what ``select`` says.
        measured: tuning results of the problem's bucket.
    """
    times = {entry.kernel: entry for entry in measured.kernels} if measured else {}
    chosen_time = times.get(choice.kernel.short_form())
    able = able_kernels(problem, facts, [choice.kernel, *(rejected.kernel for rejected in choice.rejected)])
    others: list[Candidate] = []
    unable: Counter[str] = Counter()
    for rejected in choice.rejected:
        if rejected.kernel not in able:
            unable[rejected.reason] += 1
            continue
        reason, entry = rejected.reason, times.get(rejected.kernel.short_form())
        if entry is not None and chosen_time is not None:
            reason = _measured_reason(entry, chosen_time)
        others.append(_candidate(rejected.kernel, reason, problem, facts, times))
    if chosen_time is not None:  # what was measured beside the chosen one says more than the model
        others.sort(key=lambda other: other.measured.milliseconds if other.measured else float("inf"))
    source = f"{measured.bucket.label()}, {measured.source}" if measured else ""
    if measured and choice.kernel.short_form() not in measured.took_part:
        source += "; they do not count, since the chosen kernel was not measured beside them"
    candidates = (_candidate(choice.kernel, choice.reason, problem, facts, times, chosen=True), *others)
    return ProblemExplanation(problem, facts, choice.reason, candidates, dict(unable), source)


def problem_table(e: ProblemExplanation) -> Table:
    """The candidates, the best first."""
    title = f"{e.problem.label()} on {e.device.name}, sm_{e.device.target}"
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", overflow="fold")
    for heading in ("blocks\nper SM", "at most\nTFLOP/s", "measured\nTFLOP/s"):
        table.add_column(heading, justify="right")
    table.add_column("why", overflow="fold")
    for c in e.candidates[:SHOWN]:
        measured = f"{c.measured.tflops:.1f}" if c.measured else ""
        why = f"chosen: {c.reason}" if c.chosen else c.reason
        name, bound = Text(c.kernel.short_form()), f"{c.attainable_tflops:.0f}"
        style = "bold" if c.chosen else ""
        table.add_row(name, str(c.occupancy.blocks), bound, measured, Text(why), style=style)
    return table


def notes(e: ProblemExplanation) -> list[str]:
    """What stands below the table."""
    lines = []
    if len(e.candidates) > SHOWN:
        lines.append(f"{len(e.candidates) - SHOWN} more candidates come after these (--json has all)")
    lines += [f"{count} other{'s' if count > 1 else ''}: {reason}" for reason, count in e.unable.items()]
    lines.append(f"measured: {e.measured_as}" if e.measured_as else "nothing near was measured on this card")
    return lines


def _measured_reason(entry: TunedKernel, chosen: TunedKernel) -> str:
    """Why a kernel that was measured beside the chosen one is not the one."""
    ratio = entry.tflops / chosen.tflops
    text = f"measured beside the chosen one: {entry.tflops:.1f} TFLOP/s, {ratio:.3f} times its rate"
    return f"{text}, too small a lead to count" if ratio > 1 else text


def _candidate(
    kernel: ForwardKernel,
    reason: str,
    problem: Problem,
    facts: DeviceFacts,
    times: dict[str, TunedKernel],
    chosen: bool = False,
) -> Candidate:
    config = kernel.config
    resident = occupancy(config.n_warps, predict_registers(config).total, config.smem_bytes(), facts)
    bounds = floors(work(config, problem), facts, matrix_share(config, facts))
    rate = problem.flop() / bounds.longest / 1e9
    return Candidate(kernel, chosen, reason, resident, bounds, rate, times.get(kernel.short_form()))
