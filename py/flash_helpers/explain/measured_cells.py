"""Measured times of this library's own kernels, read from result files: what predictions are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_helpers.content import CONTENT_ERRORS, ContentError, read_json
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.problem import Problem
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.problem import AttentionProblem, visible_limits

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
"""The files that are committed beside the sources; an installed package has none."""

MODES = ("hot", "graph")  # the first of these that a row has: launches back to back


@dataclass(frozen=True)
class Cell:
    """One measured time of one kernel.

    Attributes:
        file: name of the result file.
        kernel, problem, device: what was measured where.
        milliseconds: the median.
        parts: that the keys were cut into; 0: as the library does now.
    """

    file: str
    kernel: ForwardKernel
    problem: AttentionProblem
    device: DeviceFacts
    milliseconds: float
    parts: int = 0

    def label(self) -> str:
        """Where it stands and what it is."""
        return f"{self.kernel.short_form()}, {self.problem.label()}, {self.device.name} ({self.file})"


def read_cells(files: Iterable[Path]) -> tuple[list[Cell], dict[str, int]]:
    """All cells of result files that a prediction can be made for, and why the others are left out.

    Raises:
        ValueError: a file that can't be read.
    """
    cells: list[Cell] = []
    left_out: Counter[str] = Counter()
    for path in files:
        try:
            content = read_json(path)
        except (OSError, ContentError) as error:
            raise ValueError(f"{path} can't be read as a result file: {error}") from None
        rows = content.get("rows") if isinstance(content, dict) else None
        for row in rows if isinstance(rows, list) else []:
            try:
                cell = _cell(path.name, row, content.get("environment") or row.get("environment") or {})
            except CONTENT_ERRORS as error:
                left_out[_reason(error)] += 1
                continue
            if cell is not None:
                cells.append(cell)
    return cells, dict(left_out)


def _reason(error: Exception) -> str:
    text = str(error)
    if "short form" in text or "can't be read" in text or "is no kernel" in text or "Close to it" in text:
        return "a kernel whose name is of an older version"
    if isinstance(error, KeyError):
        return f"rows of a kind that is not known: they have no {text}"
    if isinstance(error, ValueError) and text:
        return text.splitlines()[0][:80]
    return f"rows that can't be read: {type(error).__name__}: {text[:80]}"


def _cell(file: str, row: Mapping[str, Any], environment: Mapping[str, Any]) -> Cell | None:
    """None for rows of other libraries and of calls that ran no named kernel."""
    mode = row.get("mode") or row.get("timed", {}).get("mode", "hot")
    if mode not in MODES:  # times of calls have the host in them
        return None
    name = row.get("kernel") or (row.get("implementation", "") if row.get("kind") == "kernel" else "")
    milliseconds = _milliseconds(row)
    if not str(name).startswith("(") or milliseconds is None:
        return None
    facts = next((facts for facts in KNOWN_DEVICES.values() if facts.name == environment.get("gpu")), None)
    if facts is None:
        raise ValueError("a card whose facts are not known")
    if "problem" in row:
        problem = attention_problem(Problem.from_json(row["problem"]))
    elif "case" in row:
        problem = _of_case(row["case"])
    else:
        problem = _of_decode(row)
    kernel = parse_kernel(name, problem.causal)
    if kernel.config.malformed_reason():
        raise ValueError("a kernel that is malformed now")
    traits = kernel.traits
    problem = replace(problem, varlen=traits.varlen, paged=traits.paged).with_rows_packed()
    return Cell(file, kernel, problem, facts, milliseconds, int(row.get("parts") or 0))


def _milliseconds(row: Mapping[str, Any]) -> float | None:
    times, scale = row.get("milliseconds"), 1.0
    if times is None:
        times, scale = row.get("us") or {}, 1e-3
    if "ours" in times:
        return float(times["ours"]["median"])
    found = next((times[mode]["median"] for mode in MODES if mode in times), None)
    return None if found is None else scale * float(found)


def _of_case(case: Mapping[str, Any]) -> AttentionProblem:
    """A row of the benchmark of features. Sequences of one length are batch items of it."""
    lengths = case.get("lengths") or []
    if len(set(lengths)) > 1:
        raise ValueError("sequences of different lengths: their blocks are not alike")
    left, right = visible_limits(
        case["causal"], (case["window"], None if case["window"] is None else 0), case["seq_q"], case["seq_k"]
    )
    return AttentionProblem(
        DType.BF16, case["batch"], case["seq_q"], case["seq_k"], case["heads"], case["heads_kv"],
        case.get("d_head", 128), case.get("d_head", 128), left, right,
    )  # fmt: skip


def _of_decode(row: Mapping[str, Any]) -> AttentionProblem:
    """A row of the benchmark of decoding: one query a sequence."""
    d_head = row.get("d_head", 128)
    return AttentionProblem(
        DType.BF16, row["batch"], 1, row["keys"], row["heads"], row["heads_kv"], d_head, d_head,
        cached="page_size" in row,
    )  # fmt: skip
