"""Which kernels could compute a problem on a device, which one would, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from flash_helpers.build.loop_facts import built_facts
from flash_helpers.explain.explanation import Performance, explain
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.model.bounds import launch_reason
from flash_helpers.model.recorded import CompiledFacts, recorded_facts
from flash_helpers.model.work import work
from flash_helpers.results.lookup import TunedBucket, TunedKernel
from flash_helpers.select.candidates import is_split, numeric_class_of, unable_reason
from flash_helpers.select.no_kernel import NoKernel

SHOWN = 6  # candidates of the table; --json has all


class RejectedKernel(Protocol):
    """A kernel that is not chosen, and why."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def reason(self) -> str: ...


class ChosenKernel(Protocol):
    """What selection says."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def reason(self) -> str: ...
    @property
    def rejected(self) -> Sequence[RejectedKernel]: ...
    @property
    def problem(self) -> AttentionProblem | None: ...


@dataclass(frozen=True)
class Candidate:
    """A kernel that can compute the problem on the device.

    Attributes:
        kernel: the kernel.
        chosen: whether it is the one.
        reason: why, or why not.
        performance: what it can do; None, as ``attainable_tflops``: the direction has no cost model.
        compiled: what is known of the compiled kernel; None: its registers are predicted.
        attainable_tflops: FLOP of the problem over the longest bound.
        measured: from the tuning results, if it was measured on such a problem.
    """

    kernel: Kernel
    chosen: bool
    reason: str
    performance: Performance | None
    compiled: CompiledFacts | None
    attainable_tflops: float | None
    measured: TunedKernel | None


@dataclass(frozen=True)
class ProblemExplanation:
    """Everything that ``flash-attention explain`` shows of a problem.

    Attributes:
        problem, device: what it is about.
        reason: why the chosen kernel is chosen.
        candidates: the chosen one first, then those measured beside it, the fastest first, then as selection
            ranks them; empty: ``attention`` runs no kernel.
        unable: why other kernels can't compute it at all, with how many share the reason.
        measured_as: the bucket of the measured times, and where they are from; empty: none.
    """

    problem: AttentionProblem
    device: DeviceFacts
    reason: str
    candidates: tuple[Candidate, ...]
    unable: dict[str, int]
    measured_as: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "problem": {**asdict(self.problem), "dtype": self.problem.dtype.name},
            "device": asdict(self.device),
            "chosen": self.candidates[0].kernel.short_form() if self.candidates else None,
            "reason": self.reason,
            "candidates": [
                {
                    "kernel": c.kernel.short_form(),
                    "chosen": c.chosen,
                    "reason": c.reason,
                    "occupancy": c.performance.occupancy.to_json() if c.performance else None,
                    "compiled": asdict(c.compiled) if c.compiled else None,
                    "bounds_ms": {b.name: b.milliseconds for b in c.performance.bounds.all}
                    if c.performance
                    else None,
                    "binding": [b.name for b in c.performance.bounds.binding] if c.performance else None,
                    "expected_ms": c.performance.expected if c.performance else None,
                    "attainable_tflops": c.attainable_tflops,
                    "measured": asdict(c.measured) if c.measured else None,
                }
                for c in self.candidates
            ],
            "unable": self.unable,
            "measured_as": self.measured_as,
        }


def explain_problem(
    problem: AttentionProblem,
    facts: DeviceFacts,
    choice: ChosenKernel | NoKernel,
    measured: TunedBucket | None = None,
) -> ProblemExplanation:
    """Puts together what selection says and what is known of each candidate; needs no GPU.

    Args:
        problem: the sizes and features.
        facts: the device.
        choice: what ``no_kernel`` says, else ``select``.
        measured: tuning results of the problem's bucket.

    Raises:
        ValueError: the chosen kernel's launch can't hold the problem; ``attention`` refuses it too.
    """
    if isinstance(choice, NoKernel):
        return ProblemExplanation(problem, facts, choice.reason, (), {}, "")
    problem = choice.problem or problem
    config = choice.kernel.config
    modelled = direction_of(config).model is not None
    if modelled and (reason := launch_reason(config, work(config, problem))):
        raise ValueError(f"attention refuses {problem.label()}: {reason}")
    times = {entry.kernel: entry for entry in measured.kernels} if measured else {}
    chosen_time = times.get(choice.kernel.short_form())
    configs = list(dict.fromkeys(k.config for k in (choice.kernel, *(r.kernel for r in choice.rejected))))
    others: list[Candidate] = []
    unable: Counter[str] = Counter()
    for rejected in choice.rejected:
        config = rejected.kernel.config
        other_class = problem.invariant and numeric_class_of(config) != numeric_class_of(choice.kernel.config)
        if unable_reason(config, problem, configs) or config.infeasible_reason(facts) or other_class:
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
    """The candidates, the best first. Registers and blocks that are predicted bear a ``~``."""
    title = f"{e.problem.label()} on {e.device.name}, sm_{e.device.target}"
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", overflow="fold")
    for heading in ("blocks\nper SM", "at most\nTFLOP/s", "bound by", "measured\nTFLOP/s"):
        table.add_column(heading, justify="right")
    table.add_column("why", overflow="fold")
    if not e.candidates:
        table.add_row("none", "", "", "", "", Text(e.reason), style="bold")
    for c in e.candidates[:SHOWN]:
        measured = f"{c.measured.tflops:.1f}" if c.measured else ""
        why = f"chosen: {c.reason}" if c.chosen else c.reason
        blocks = bound = by = ""
        if c.performance is not None:
            blocks = f"{'' if c.compiled else '~'}{c.performance.occupancy.blocks}"
            bound, by = f"{c.attainable_tflops:.0f}", c.performance.bounds.text()
        style = "bold" if c.chosen else ""
        name = Text(c.kernel.short_form())
        table.add_row(name, blocks, bound, by, measured, Text(why), style=style)
    return table


def notes(e: ProblemExplanation) -> list[str]:
    """What stands below the table."""
    lines: list[str] = []
    if not e.candidates:
        return lines
    if len(e.candidates) > SHOWN:
        lines.append(f"{len(e.candidates) - SHOWN} more candidates come after these (--json has all)")
    if e.problem.invariant:
        lines.append(f"numeric class: {numeric_class_of(e.candidates[0].kernel.config)}")
    lines += [f"{count} other{'s' if count > 1 else ''}: {reason}" for reason, count in e.unable.items()]
    if any(c.performance is not None and c.compiled is None for c in e.candidates[:SHOWN]):
        lines.append("~: by predicted registers; --model-error says how far off these are")
    lines.append(f"measured: {e.measured_as}" if e.measured_as else "nothing near was measured on this card")
    return lines


def _measured_reason(entry: TunedKernel, chosen: TunedKernel) -> str:
    """Why a kernel that was measured beside the chosen one is not the one."""
    ratio = entry.tflops / chosen.tflops
    text = f"measured beside the chosen one: {entry.tflops:.1f} TFLOP/s, {ratio:.3f} times its rate"
    return f"{text}, too small a lead to count" if ratio > 1 else text


def _candidate(
    kernel: Kernel,
    reason: str,
    problem: AttentionProblem,
    facts: DeviceFacts,
    times: dict[str, TunedKernel],
    chosen: bool = False,
) -> Candidate:
    """What is known of one kernel, as if the tensors had its head sizes, which padding makes true."""
    config = kernel.config
    padded = replace(problem, d_head=config.d_head, d_head_v=config.d_head_v)
    compiled = recorded_facts(kernel, facts.target)
    if chosen and compiled is None:
        compiled = built_facts(kernel, facts.target)
    found = explain(config, padded, facts, compiled, split=is_split(kernel), neighbours=False)
    assert found.infeasible is None, found.infeasible
    rate = None
    if found.performance is not None:
        rate = work(config, problem).flop / found.performance.bounds.longest / 1e9
    return Candidate(
        kernel, chosen, reason, found.performance, found.compiled, rate, times.get(kernel.short_form())
    )
