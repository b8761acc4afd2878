"""What the figures show, taken from result files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.benchmark.result_file import CHOICE
from flash_helpers.benchmark.results import (
    OtherSchemaError,
    ResultFileError,
    Results,
    Row,
    check_same_card,
)
from flash_helpers.kernel_configs import get_kernel_progression_configs, parse_kernel_name_into_config
from flash_helpers.kernels.families import direction_of, family_of
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.ladders import LADDERS, get_ladder
from flash_helpers.problem import Problem

OURS = "this library"  # the fastest configuration of each size
UNKNOWN_FAMILY = "other kernels"  # named by another version of the library

Family = tuple[str, int, bool]
"""What one panel shows: (dtype name, d_head, causal)."""


@dataclass(frozen=True)
class Report:
    """Rows of one card, each (implementation, problem) once, and the card's measured matrix rates.

    Attributes:
        rows: timed rows; of repeated ones the last.
        missing: rows that were not timed.
        matrix_tflops: dtype name to TFLOP/s; empty for a processor.
        mode: which timing is shown.
        skipped: why files were left out, a line each.
    """

    rows: tuple[Row, ...]
    missing: tuple[Row, ...]
    matrix_tflops: dict[str, float]
    mode: str
    skipped: tuple[str, ...] = ()

    def families(self) -> list[Family]:
        """The panels, in order."""
        return sorted({_family(row.problem) for row in self.rows})

    def rows_in_order(self) -> list[Row]:
        """All rows panel by panel, the lengths of each in order, the fastest of a problem first."""
        return sorted(
            self.rows,
            key=lambda row: (
                _family(row.problem), row.problem.seq_len, row.problem, -(row.tflops(self.mode) or 0.0)
            ),
        )  # fmt: skip

    def best_rows(self) -> list[Row]:
        """The rows of all peers, and of the kernels on each problem the fastest."""
        best: dict[tuple[str, Problem], Row] = {}
        for row in self.rows:
            key = (OURS if row.kind == "kernel" else row.implementation, row.problem)
            if key not in best or (row.tflops(self.mode) or 0.0) > (best[key].tflops(self.mode) or 0.0):
                best[key] = row
        return list(best.values())

    def curves(self, family: Family) -> dict[str, dict[int, float]]:
        """Implementation to {seq_len: TFLOP/s}; all kernels together are ``OURS``, the best of each size.

        Where several problems of a family have one length, all implementations are shown on the same one.
        """
        shown = self._shown_problems(family)
        curves: dict[str, dict[int, float]] = {}
        for row in self.best_rows():
            seq_len = row.problem.seq_len
            if shown.get(seq_len) == row.problem:
                name = OURS if row.kind == "kernel" else row.implementation
                curves.setdefault(name, {})[seq_len] = row.tflops(self.mode) or 0.0
        peers = sorted(name for name in curves if name != OURS)
        return {name: dict(sorted(curves[name].items())) for name in [OURS, *peers] if name in curves}

    def parts(self) -> list[tuple[str, Report]]:
        """(title, report) of what may be seen as one picture: one element type and one family of kernels.

        ``attention()``, whose kernels may be of several families, is a part of its own. Peers are in each.
        """
        peers = [row for row in self.rows if row.kind != "kernel"]
        kernels: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.kind == "kernel":
                kernels.setdefault((_contender(row), row.problem.dtype.name), []).append(row)
        return [
            (
                f"{name}, {dtype.lower()}",
                replace(self, rows=(*rows, *(row for row in peers if row.problem.dtype.name == dtype))),
            )
            for (name, dtype), rows in sorted(kernels.items())
        ]

    def _shown_problems(self, family: Family) -> dict[int, Problem]:
        """The problem of each length; of several, what most implementations have, then the largest."""
        implementations = Counter(row.problem for row in self.best_rows() if _family(row.problem) == family)
        found: dict[int, Problem] = {}
        for problem in sorted(implementations, key=lambda p: (implementations[p], p.flop(), p)):
            found[problem.seq_len] = problem
        return found

    def ratios(self) -> dict[Family, dict[int, float]]:
        """Family to {seq_len: best kernel / best peer}, where both were timed."""
        found: dict[Family, dict[int, float]] = {}
        for family in self.families():
            curves = self.curves(family)
            ours = curves.pop(OURS, {})
            for seq_len, rate in ours.items():
                peers = [curve[seq_len] for curve in curves.values() if seq_len in curve]
                if peers:
                    found.setdefault(family, {})[seq_len] = rate / max(peers)
        return found

    def ladder(self) -> tuple[Problem, list[tuple[str, float]]] | None:
        """(problem, [(step, TFLOP/s)]) of the ladder and problem with most steps; the seven before others."""
        rates = self.rates_by_problem()
        seven = [(c.short_form(), c.short_form(include_tup=False)) for c in get_kernel_progression_configs()]
        found: list[tuple[Problem, list[tuple[str, float]]]] = []
        for problem, timed in sorted(rates.items(), key=lambda item: -item[0].flop()):
            ladders = [seven]
            for family, d_heads in LADDERS.items():
                if problem.d_head in d_heads:
                    rungs = get_ladder(family, problem.dtype, problem.d_head, problem.causal)
                    ladders.append([(rung.config.short_form(), rung.step.idea) for rung in rungs])
            for steps in ladders:
                named = [(label, timed[name]) for name, label in steps if name in timed]
                found.append((problem, named))
        best = max(found, key=lambda pair: len(pair[1]), default=None)
        return best if best and best[1] else None

    def rates_by_problem(self) -> dict[Problem, dict[str, float]]:
        """TFLOP/s by problem and implementation; kernels by their configuration's short form."""
        timed: dict[Problem, dict[str, float]] = {}
        for row in self.rows:
            rate = row.tflops(self.mode)
            if rate is not None:
                timed.setdefault(row.problem, {})[row.implementation.split(" | ")[0]] = rate
        return timed

    def landscape(self) -> tuple[Problem, list[tuple[KernelConfig, float]]] | None:
        """(problem, [(configuration, TFLOP/s)]): the problem of most with a ``variant``, of 2 at least."""
        timed: dict[Problem, list[tuple[KernelConfig, float]]] = {}
        for row in self.rows:
            rate = row.tflops(self.mode)
            if row.kind == "kernel" and rate is not None and row.implementation.startswith("("):
                try:
                    config = parse_kernel_name_into_config(row.implementation)
                except ValueError:
                    continue  # the file is of a version with other choices
                if direction_of(config).variant is None:
                    continue  # the landscape's axes are not its fields
                timed.setdefault(row.problem, []).append((config, rate))
        if not timed:
            return None
        problem = max(timed, key=lambda p: (len(timed[p]), p))
        return (problem, timed[problem]) if len(timed[problem]) > 1 else None


def load_report(paths: Iterable[Path], mode: str = "hot") -> Report:
    """Reads result files; screening rows of a milestone file count too.

    JSON files of another schema are skipped, with the reason, as long as there is one to show.

    Raises:
        ResultFileError: a file that can't be read, or no result file among them.
        DifferentCardsError: rows of several cards.
        ValueError: no timed row.
    """
    paths = list(paths)
    rows: list[Row] = []
    matrix: dict[str, float] = {}
    skipped: list[str] = []
    for path in paths:
        try:
            results = Results.load(path)
        except OtherSchemaError as error:
            skipped.append(str(error))
            continue
        matrix.update(results.matrix_tflops)
        rows += results.screening + results.rows
    if skipped and len(skipped) == len(paths):
        raise ResultFileError("none of the files can be shown: " + "; ".join(skipped))
    check_same_card(rows)
    timed = {(r.implementation, r.problem): r for r in rows if r.tflops(mode) is not None}
    missing = {(r.implementation, r.problem): r for r in rows if r.tflops(mode) is None}
    if not timed:
        names = ", ".join(map(str, paths))
        modes = ", ".join(sorted({name for row in rows for name in row.timings})) or "none"
        raise ValueError(
            f"no row of {names} was timed in mode {mode!r}; choose one that was with --mode: {modes}"
        )
    if any(row.environment.get("gpu") == "cpu" for row in rows):
        matrix = {}  # a processor's rate of a matrix product is no ceiling; older files have one
    untimed = tuple(row for key, row in missing.items() if key not in timed)
    return Report(tuple(timed.values()), untimed, matrix, mode, tuple(skipped))


def family_label(family: Family) -> str:
    """A panel's title, e.g. ``fp16, d 128, causal``."""
    dtype, d_head, causal = family
    return f"{dtype.lower()}, d {d_head}" + (", causal" if causal else "")


def seq_lens_of(ratios: dict[Family, dict[int, float]]) -> Sequence[int]:
    """All lengths of a ratio table, sorted."""
    return sorted({seq_len for row in ratios.values() for seq_len in row})


def _contender(row: Row) -> str:
    """Whose row it is: the library's own choice, or the family of a kernel."""
    if row.implementation == CHOICE:
        return "attention()"
    try:
        config = parse_kernel_name_into_config(row.implementation)
    except ValueError:
        return UNKNOWN_FAMILY  # the file is of a version with other kernels
    return f"{family_of(config).name.capitalize()} family"


def _family(problem: Problem) -> Family:
    return problem.dtype.name, problem.d_head, problem.causal
