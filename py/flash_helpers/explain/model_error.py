"""How far predictions are off: registers against compiled kernels, times against measured ones."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.console.output import console_for, write_json
from flash_helpers.console.writable import check_file
from flash_helpers.explain.measured_cells import RESULTS, Cell, read_cells
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.families import direction_of, family_of
from flash_helpers.model.recorded import all_recorded, compiler
from flash_helpers.model.resources import predict_registers
from flash_helpers.model.step_costs import predicted_instructions
from flash_helpers.select.prediction import expected_seconds, predict, with_rates

FEW_QUERIES = 64


@dataclass(frozen=True)
class ErrorRow:
    """The errors of one kind of prediction.

    Attributes:
        what: registers, instructions or time.
        group: which kernels and problems.
        count: of comparisons.
        median, worst: registers: of the absolute differences; else of the ratios beyond 1, in per cent.
        bias: median of predicted over known.
        worst_case: what the worst one is of, with the prediction and what is known.
    """

    what: str
    group: str
    count: int
    median: float
    worst: float
    bias: float
    worst_case: str

    def figures(self) -> tuple[str, str]:
        """Median and worst as text."""
        if self.what == "registers":
            return f"{self.median:g}", f"{self.worst:g}"
        return f"{self.median:.1f} %", f"{self.worst:.0f} %"


def compiled_errors() -> list[ErrorRow]:
    """Registers and main loops of every recorded kernel."""
    registers: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    loops: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for (name, target), facts in all_recorded().items():
        kernel = parse_kernel(name, False)
        group, case = f"{family_of(kernel).name}, sm_{target}", f"{name}, sm_{target}"
        registers[group].append((predict_registers(kernel.config).total, facts.registers, case))
        if facts.instructions:
            loops[group].append((predicted_instructions(kernel.config), facts.instructions, case))
    return [
        *(_row("registers", group, found) for group, found in sorted(registers.items())),
        *(_row("instructions", group, found) for group, found in sorted(loops.items())),
    ]


def time_errors(cells: Iterable[Cell]) -> list[ErrorRow]:
    """Predicted against measured times by family, direction, card and kind of problem; all together first."""
    groups: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for cell in cells:
        milliseconds = predicted_ms(cell)
        if milliseconds is None:
            continue
        kind = "few queries" if cell.problem.seq_len_q <= FEW_QUERIES else "prompts"
        card = cell.device.name.split()[1]
        found = (milliseconds, cell.milliseconds, cell.label())
        label = direction_of(cell.kernel).label
        for group in ("all", f"{label}, {kind}", f"{label}, {kind}, {card}"):
            groups[group].append(found)
    return [_row("time", group, found) for group, found in sorted(groups.items())]


def predicted_ms(cell: Cell) -> float | None:
    """The prediction for a cell; None: no block of the kernel fits the card."""
    prediction = predict(cell.kernel, cell.problem, cell.device)
    if not prediction.blocks_per_sm:
        return None
    if not cell.parts or cell.parts == prediction.n_splits:
        return 1e3 * prediction.seconds
    facts = with_rates(cell.device)
    return 1e3 * expected_seconds(cell.kernel, cell.problem, facts, prediction.blocks_per_sm, cell.parts)


def model_error_command(
    results: Iterable[Path] = (), json_path: Path | None = None, console: Console | None = None
) -> list[ErrorRow]:
    """Prints the errors of the model over recorded kernels and measured times.

    Args:
        results: result files; none: those beside the sources, where there are any.
        json_path: write the rows there.

    Raises:
        ValueError: a result file can't be read.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    console = console or console_for(json_path)
    files = list(results) or sorted(RESULTS.glob("*.json"))
    rows = compiled_errors()
    cells, left_out = read_cells(files)
    rows += time_errors(cells)
    console.print(_table(rows))
    for row in rows:
        if row.group == "all" or row.what != "time":
            console.print(f"worst of {row.what}, {row.group}: {row.worst_case}", markup=False)
    console.print(f"compiled facts: {len(all_recorded())} kernels, {compiler()}", markup=False)
    if not files:
        console.print("measured times: none here; name result files to compare with them", markup=False)
    for reason, count in sorted(left_out.items()):
        console.print(f"left out: {count} rows: {reason}", markup=False)
    write_json(json_path, [asdict(row) for row in rows])
    return rows


def _row(what: str, group: str, found: list[tuple[float, float, str]]) -> ErrorRow:
    def error(predicted: float, known: float) -> float:
        if what == "registers":
            return abs(predicted - known)
        return 100 * (max(predicted / known, known / predicted) - 1)

    errors = [error(predicted, known) for predicted, known, _ in found]
    worst = max(range(len(found)), key=lambda n: errors[n])
    predicted, known, case = found[worst]
    unit = " ms" if what == "time" else ""
    text = f"{case}: predicted {predicted:.4g}{unit}, in fact {known:.4g}{unit}"
    bias = median(predicted / known for predicted, known, _ in found)
    return ErrorRow(what, group, len(found), median(errors), errors[worst], bias, text)


def _table(rows: list[ErrorRow]) -> Table:
    table = Table(title="errors of the model", title_justify="left")
    for heading in ("prediction", "of"):
        table.add_column(heading)
    for heading in ("number", "median", "worst", "predicted / in fact"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.what, Text(row.group), str(row.count), *row.figures(), f"{row.bias:.2f}")
    return table


PAGE = """# The model's errors

Made by `python -m flash_helpers.explain.model_error docs/model-error.md`;
`flash-attention explain --model-error` prints the same.

Predicted registers and instructions of the main loop are held against {compiled} compiled kernels
({compiler}), predicted times against the result files. A time is off by its ratio: 5 % means 1.05 times
too long or too short.

| prediction | of | number | median error | worst error | predicted / in fact |
| --- | --- | ---: | ---: | ---: | ---: |
{rows}

Worst of all times: `{worst}`.
"""


def page(rows: list[ErrorRow]) -> str:
    """The errors as a page of the documentation."""
    lines = []
    for row in rows:
        middle, worst = row.figures()
        lines.append(f"| {row.what} | {row.group} | {row.count} | {middle} | {worst} | {row.bias:.2f} |")
    case = next((row.worst_case for row in rows if row.group == "all"), "none was measured here")
    return PAGE.format(compiled=len(all_recorded()), compiler=compiler(), rows="\n".join(lines), worst=case)


def main() -> None:
    """Writes the page to the file that is named."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m flash_helpers.explain.model_error FILE")
    cells, _ = read_cells(sorted(RESULTS.glob("*.json")))
    Path(sys.argv[1]).write_text(page([*compiled_errors(), *time_errors(cells)]), encoding="utf-8")


if __name__ == "__main__":
    main()
