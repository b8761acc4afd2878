"""Explanations as text: one configuration, or two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flash_helpers.explain.explanation import Explanation, Performance
from flash_helpers.kernels.families import direction_of
from flash_helpers.model.of import model_of
from flash_helpers.model.register_error import register_error
from flash_helpers.select.prediction import MODEL_ERROR

Line = tuple[str, str]


def summary_lines(e: Explanation) -> list[Line]:
    """(what, value) of everything but the rejected neighbours, in reading order."""
    lines = [("runs there", "yes" if e.infeasible is None else f"no: {e.infeasible}"), *_register_lines(e)]
    lines.append(("shared memory", f"{e.smem_bytes:,} bytes a block"))
    if e.numeric_class is not None:
        lines.append(("numeric class", str(e.numeric_class)))
        other = e.invariant_obstacle
        lines.append(
            ("", "the one of numerics='invariant' there" if other is None else f"not invariant: {other}")
        )
    if e.work is not None:
        lines += [
            ("FLOP", f"{e.work.flop:.3e}; executed {e.work.executed_flop:.3e}"),
            ("bytes", f"{e.work.min_bytes:,} at least from memory; {e.work.l2_bytes:,} through L2"),
        ]
    else:
        of = direction_of(e.kernel).label
        lines.append(("time, predicted", f"no: there is no cost model of {of} kernels; bench measures them"))
    if e.performance is not None:
        lines += _performance_lines(e, e.performance)
    for access in e.accesses:
        conflict = "no conflicts" if access.ways == 1 else f"{access.ways:g}-way conflict"
        lines.append((access.name, f"{access.wavefronts} wavefronts, {conflict}"))
    if e.compiled:
        shown = ", ".join(f"{name} {number}" for name, number in e.main_loop.items())
        note = getattr(e.compiled, "note", "")
        if e.compiled.instructions and not shown:
            shown = f"{e.compiled.instructions} instructions of a warp ({e.compiled.source})"
        lines.append(("main loop", shown or note or "not looked at: --compile does"))
    return lines


def _performance_lines(e: Explanation, p: Performance) -> list[Line]:
    limits = ", ".join(f"{name} {limit}" for name, limit in p.occupancy.limits.items())
    basis = "by compiled registers" if e.compiled else "by predicted registers"
    parts = f", keys in {p.parts} parts" if p.parts > 1 else ""
    lines = [
        ("blocks per SM", f"{p.occupancy.blocks}, limited by {' and '.join(p.occupancy.limited_by)}"),
        ("", f"allowed by {limits}; {basis}"),
        ("warps per SM", str(p.occupancy.warps)),
        ("thread blocks", f"{p.waves.thread_blocks:,}, {p.waves.at_a_time:,} at a time{parts}"),
        ("waves", f"{p.waves.waves:.2f}; the tail leaves {p.waves.utilisation:.1%} in use"),
    ]
    lines += [
        (f"bound: {bound.name}", f"{bound.milliseconds:.4f} ms ({bound.how})") for bound in p.bounds.all
    ]
    if p.around is not None:
        lines.append((p.around.name, f"{p.around.milliseconds:.4f} ms more at least ({p.around.how})"))
    assert e.work is not None  # as wherever there is a performance
    rate = e.work.flop / p.expected / 1e9
    lines += [
        ("binding", f"{p.bounds.text()}: at most {e.attainable_tflops:.0f} TFLOP/s"),
        ("time, predicted", f"{p.expected:.4f} ms, {rate:.0f} TFLOP/s; {_time_error()}"),
    ]
    return lines


def _time_error() -> str:
    return f"half of the model's errors are above {100 * MODEL_ERROR:.0f} % (--model-error)"


def _register_lines(e: Explanation) -> list[Line]:
    """Predicted and compiled ones apart; a prediction with its error over all recorded kernels."""
    r = e.registers
    lines: list[Line] = []
    if e.compiled:
        source = f" ({e.compiled.source})" if e.compiled.source else ""
        lines.append(("registers, compiled", f"{e.compiled.registers}{source}"))
        lines.append(("spills, compiled", f"{e.compiled.spill_bytes} bytes a thread"))
    if r is None:
        return lines or [("registers, compiled", "not known: --compile asks the compiler")]
    if (known := model_of(e.kernel.config).register_lines(r)) is not None:
        return [*lines, *known]
    error = register_error()
    text = (
        f"{r.total} ({r.accumulators} O and S, {r.held_Q} Q, {r.overhead} other); off by {error.median:g} in "
        f"the middle of {error.count} compiled kernels, by {error.worst:g} at worst"
    )
    lines.append(("registers, predicted", text))
    if r.predicted_spill and not e.compiled:
        lines.append(("", f"{r.predicted_spill} more than a thread has are predicted: spills are likely"))
    return lines


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
        compiled = bool(a.main_loop and b.main_loop)
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
    counts = e.main_loop
    return lines + [(f"main loop: {name}", str(number)) for name, number in counts.items()]


def _title(e: Explanation) -> str:
    return f"{e.kernel.short_form()}\n{e.problem.label()} on {e.device.name}, sm_{e.device.target}"
