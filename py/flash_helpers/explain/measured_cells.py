"""Measured times of this library's own kernels, read from result files: what predictions are held against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.result_file import BOTH, ResultFile
from flash_helpers.content import CONTENT_ERRORS
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, MAX_DECODE_ROWS, AttentionProblem, visible_limits

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
"""The files that are committed beside the sources; an installed package has none."""

OF_FUNCTIONS = re.compile(r"\bmod_[0-9a-f]{16}\b")  # in a kernel's name
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
    kernel: Kernel
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
        for row in ResultFile.load(path).rows:
            try:
                cell = _cell(path.name, row)
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


def _cell(file: str, row: Mapping[str, Any]) -> Cell | None:
    """None for rows without a time of one of the library's kernels alone.

    They are of other libraries, screenings, both passes in one time, or have no kernel's name, or the host's
    time; or they are of functions and what says the same, where the sizes do not tell what is hidden.
    """
    if "stage" in row or row.get("variant") in ("mod", "twin") or row.get("direction") == BOTH:
        return None
    name = row.get("kernel") or (row["implementation"] if row["kind"] == "kernel" else "")
    if OF_FUNCTIONS.search(name):
        return None
    times = row["milliseconds"]
    mode = next((mode for mode in MODES if mode in times), None)
    if not name.startswith("(") or mode is None:
        return None
    gpu = row["environment"].get("gpu")
    facts = next((facts for facts in KNOWN_DEVICES.values() if facts.name == gpu), None)
    if facts is None:
        raise ValueError("a card whose facts are not known")
    problem = _problem(row["problem"])
    kernel = parse_kernel(name, problem.causal)
    if kernel.config.malformed_reason():
        raise ValueError("a kernel that is malformed now")
    traits = kernel.traits
    if row["problem"].get("softcap"):
        raise ValueError("a soft cap, whose time depends on how large the scores are")
    if direction_of(kernel).name == BACKWARD:
        problem = replace(problem, varlen=traits.varlen).backward()
    else:
        if traits.split and not row.get("n_splits") and problem.seq_len_q > MAX_DECODE_ROWS:
            raise ValueError("keys of a prompt in parts, without their number")
        problem = replace(problem, varlen=traits.varlen, paged=traits.paged).with_rows_packed()
    return Cell(file, kernel, problem, facts, float(times[mode]["median"]), row.get("n_splits", 0))


def _problem(values: Mapping[str, Any]) -> AttentionProblem:
    """A row's problem. Sequences of one length are batch items of it."""
    if len(set(values.get("lengths", ()))) > 1:
        raise ValueError("sequences of different lengths: their blocks are not alike")
    window, d_head = values.get("window"), values["d_head"]
    limits = (window, None if window is None else values.get("window_right", 0))
    sizes = {name: values[name] for name in ("batch", "seq_len_q", "seq_len_k", "n_heads", "n_heads_kv")}
    left, right = visible_limits(values["causal"], limits, sizes["seq_len_q"], sizes["seq_len_k"])
    return AttentionProblem(
        DType.from_string(values["dtype"]), **sizes, d_head=d_head,
        d_head_v=values.get("d_head_v", d_head), left=left, right=right,
        cached="page_size" in values,
    )  # fmt: skip
