"""Explanations as text: one configuration, or two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flash_helpers.explain.explanation import Explanation
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig

Line = tuple[str, str]


def summary_lines(e: Explanation) -> list[Line]:
    """(what, value) of everything but the rejected neighbours, in reading order."""
    predicted = e.registers
    lines = [("runs there", "yes" if e.infeasible is None else f"no: {e.infeasible}"), *_register_lines(e)]
    if predicted.predicted_spill:
        lines.append(("", f"{predicted.predicted_spill} more than a thread has: expect spills"))
    if e.compiled:
        lines.append(("registers, compiled", str(e.compiled.registers)))
        lines.append(("spills, compiled", f"{e.compiled.spill_bytes} bytes a thread"))
    limits = ", ".join(f"{name} {limit}" for name, limit in e.occupancy.limits.items())
    lines += [
        ("shared memory", f"{e.smem_bytes:,} bytes a block"),
        ("blocks per SM", f"{e.occupancy.blocks}, limited by {' and '.join(e.occupancy.limited_by)}"),
        ("", f"allowed by {limits}"),
        ("warps per SM", str(e.occupancy.warps)),
        ("thread blocks", f"{e.waves.thread_blocks:,}, {e.waves.at_a_time:,} at a time"),
        ("waves", f"{e.waves.waves:.2f}; the tail leaves {e.waves.utilisation:.1%} in use"),
        ("FLOP", f"{e.work.flop:.3e}; executed {e.work.executed_flop:.3e}"),
        ("bytes", f"{e.work.min_bytes:,} at least from memory; {e.work.l2_bytes:,} through L2"),
        ("floor: memory", f"{e.floors.memory:.4f} ms"),
        ("floor: matrix", f"{e.floors.matrix:.4f} ms"),
        ("floor: exp2", f"{e.floors.exp2:.4f} ms"),
        ("binding", f"{e.floors.binding}: at most {e.attainable_tflops:.0f} TFLOP/s"),
    ]
    for access in e.accesses:
        conflict = "no conflicts" if access.ways == 1 else f"{access.ways:g}-way conflict"
        lines.append((access.name, f"{access.wavefronts} wavefronts, {conflict}"))
    if e.compiled:
        counts = e.compiled.main_loop
        shown = ", ".join(f"{name} {number}" for name, number in counts.items())
        lines.append(("main loop", shown or e.compiled.note or "not found"))
    return lines


def _register_lines(e: Explanation) -> list[Line]:
    r = e.registers
    if isinstance(e.kernel.config, HopperForwardKernelConfig):
        parts = f"{r.accumulators} O and S, {r.held_P} P, {r.overhead} other, of {r.budget}"
        return [("registers, consumer", parts), ("registers, launch", str(r.total))]
    return [
        ("registers, predicted", f"{r.total} ({r.accumulators} O and S, {r.held_Q} Q, {r.overhead} other)")
    ]


def explanation_table(e: Explanation) -> Table:
    """One explanation."""
    table = Table(title=_title(e), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_lines(e):
        table.add_row(name, Text(value))
    if e.rejected:
        table.add_section()
        for rejected in e.rejected:
            table.add_row(f"not {rejected.change}", Text(rejected.reason))
    return table


def diff_lines(a: Explanation, b: Explanation) -> list[tuple[str, str, str]]:
    """(what, value of a, value of b) where the two differ; instruction classes one by one."""
    left, right = dict(_flat(a)), dict(_flat(b))
    names = list(dict.fromkeys([*left, *right]))
    return [(n, left.get(n, ""), right.get(n, "")) for n in names if left.get(n) != right.get(n)]


def diff_table(a: Explanation, b: Explanation) -> Table:
    """Two explanations side by side, only what differs."""
    table = Table(title=f"{a.problem.label()} on {a.device.name}", title_justify="left")
    table.add_column("")
    table.add_column(Text(a.kernel.short_form()), overflow="fold")
    table.add_column(Text(b.kernel.short_form()), overflow="fold")
    lines = diff_lines(a, b)
    for name, left, right in lines:
        table.add_row(name, Text(left), Text(right))
    if not lines:
        compiled = a.compiled is not None and b.compiled is not None
        table.caption = (
            "no figure differs" if compiled else "no prediction differs; --compile compares machine code"
        )
    return table


def _flat(e: Explanation) -> Sequence[Line]:
    lines, section = [], ""
    for name, value in summary_lines(e):
        if name == "main loop":
            continue
        section = name or section
        lines.append((name or f"{section}, more", value))
    counts = e.compiled.main_loop if e.compiled else {}
    return lines + [(f"main loop: {name}", str(number)) for name, number in counts.items()]


def _title(e: Explanation) -> str:
    return f"{e.kernel.short_form()}\n{e.problem.label()} on {e.device.name}, sm_{e.device.target}"
