"""Measured rows of problems that ``bench`` knows, and the result files that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.result_file import (
    SCHEMA,
    OtherSchemaError,
    ResultFile,
    ResultFileError,
    broken_rows,
)
from flash_helpers.benchmark.timing import Timing
from flash_helpers.content import CONTENT_ERRORS, amount, typed
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import Problem

__all__ = [
    "SCHEMA", "DifferentCardsError", "OtherSchemaError", "ResultFileError", "Results", "Row", "best_peer",
    "broken_rows", "check_same_card", "problem_to_json",
]  # fmt: skip

# What must be equal before two times may be compared.
CARD_FACTS = ("gpu", "capability")

BENCHMARKS = {
    "bench": "kernels and peers on a grid of problems",
    "ladder": "the steps of a family's ladder, and peers",
    "milestone": "the figures that a release is judged by",
    "ampere_choices": "the Ampere family's choices beside FlashAttention-2",
    "hopper_variants": "variants of the Hopper family's chosen kernels, and peers",
    "fa3_backward": "FlashAttention-3's gradients at head size 256",
}
"""Whose files hold such rows, and what they are about. Others have windows, packed sequences or parts."""

SCREENING = "screening"


class DifferentCardsError(ValueError):
    """Rows of different cards were to be compared."""


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem in the words of result files."""
    return {
        "dtype": problem.dtype.name, "batch": problem.batch, "n_heads": problem.heads,
        "n_heads_kv": problem.heads_kv, "seq_len_q": problem.seq_len, "seq_len_k": problem.seq_len_k,
        "d_head": problem.d_head, "causal": problem.causal,
    }  # fmt: skip


def problem_from_json(values: dict[str, Any], direction: str = FORWARD) -> Problem:
    """The inverse of ``problem_to_json``; rows say the direction. Raises one of ``CONTENT_ERRORS``."""
    return Problem(
        DType.from_string(values["dtype"]), values["batch"], values["n_heads"], values["seq_len_q"],
        values["d_head"], values["causal"], values["n_heads_kv"], values["seq_len_k"], direction,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One implementation on one problem.

    Attributes:
        implementation: a kernel's short form, or a peer's name.
        kind: ``kernel`` or ``peer``.
        problem: the sizes.
        status: ``ok``, ``wrong`` (not timed), ``failed`` (raised) or ``unavailable``.
        reason: why it is not ``ok``.
        error: relative error against the float32 reference.
        timings: mode (``hot``, ``paused``, ``cold``, ``graph``, ``call``) to times.
        gpu_state: clocks, temperature and power right after the measurement.
        environment: the facts of the run.
        kernel: short form of the kernel that ran, where the implementation chose one; else empty.
        variant: what a benchmark of variants calls it; else empty.
    """

    implementation: str
    kind: str
    problem: Problem
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    gpu_state: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    kernel: str = ""
    variant: str = ""

    @property
    def direction(self) -> str:
        """What was computed. A row of a file that says none is of ``forward``."""
        return self.problem.direction

    @property
    def shown_name(self) -> str:
        """For tables: the implementation, and the kernel that it chose."""
        return f"{self.implementation}, which ran {self.kernel}" if self.kernel else self.implementation

    def tflops(self, mode: str = "hot") -> float | None:
        """10^12 FLOP a second by the median time of ``mode``; None when it was not measured."""
        timing = self.timings.get(mode)
        return self.problem.flop() / timing.median / 1e9 if timing else None

    def to_json(self) -> dict[str, Any]:
        """Plain values: a row of a result file. What is as ``Row`` has it unsaid is left out."""
        row = {
            "implementation": self.implementation,
            "kind": self.kind,
            "problem": problem_to_json(self.problem),
            "milliseconds": {mode: timing.to_json() for mode, timing in self.timings.items()},
        }
        said = {
            "status": self.status if self.status != "ok" else "",
            "reason": self.reason,
            "error": self.error,
            "kernel": self.kernel,
            "direction": self.direction if self.direction != FORWARD else "",
            "variant": self.variant,
            "environment": self.environment,
            "gpu_state": self.gpu_state,
        }
        return row | {name: value for name, value in said.items() if value not in ("", None, {})}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """The inverse of ``to_json``. Raises one of ``CONTENT_ERRORS`` where the values are no row."""
        error = values.get("error")
        row = cls(
            implementation=typed(values, "implementation", str),
            kind=typed(values, "kind", str),
            problem=problem_from_json(values["problem"], values.get("direction", FORWARD)),
            timings={mode: Timing.from_json(t) for mode, t in typed(values, "milliseconds", dict).items()},
            error=None if error is None else float(error),
            **{name: values[name] for name in OPTIONAL if name in values},
        )
        for mode in row.timings:
            amount(row.tflops(mode))
        return row


OPTIONAL = ("status", "reason", "kernel", "variant", "environment", "gpu_state")


@dataclass
class Results:
    """The rows of a run, with the card's measured ceilings.

    Attributes:
        rows: in the order measured.
        matrix_tflops: measured rate of a large matrix product by dtype name, TFLOP/s.
        facts: what else holds for the whole run, plain JSON values by name.
        screening: rows of a first, short measurement, which decided what the others are of.
        benchmark: the program, a name of ``BENCHMARKS``.
    """

    rows: list[Row] = field(default_factory=list)
    matrix_tflops: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    screening: list[Row] = field(default_factory=list)
    benchmark: str = "bench"

    def file(self) -> ResultFile:
        """What a result file holds."""
        matrix = {"matrix_tflops": self.matrix_tflops} if self.matrix_tflops else {}
        first = [{**row.to_json(), "stage": SCREENING} for row in self.screening]
        directions = {row.direction for row in self.rows}
        return ResultFile(
            self.benchmark,
            BENCHMARKS[self.benchmark],
            [*first, *(row.to_json() for row in self.rows)],
            facts={**matrix, **self.facts},
            direction=directions.pop() if len(directions) == 1 else FORWARD,
        )

    def save(self, path: Path) -> None:
        """Writes the file in one step: a reader or an interruption never sees half of it."""
        self.file().save(path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file that ``save`` wrote.

        Raises:
            OtherSchemaError: JSON of another schema, or the rows of another kind of benchmark.
            ResultFileError: no such file, no JSON, or a broken row.
        """
        file = ResultFile.load(path)
        if file.benchmark not in BENCHMARKS:
            raise OtherSchemaError(
                f"{path} is of the benchmark {file.benchmark!r}; this reads files of {', '.join(BENCHMARKS)}"
            )
        facts = dict(file.facts)
        try:
            matrix = facts.pop("matrix_tflops", {})
            found = cls([], {name: amount(rate) for name, rate in matrix.items()}, facts, [], file.benchmark)
            for values in file.rows:
                rows = found.screening if values.get("stage") == SCREENING else found.rows
                rows.append(Row.from_json(values))
        except CONTENT_ERRORS as error:
            raise broken_rows(path, error) from error
        return found


def check_same_card(rows: Iterable[Row]) -> None:
    """Refuses rows that were measured on different cards.

    Raises:
        DifferentCardsError: names the cards found.
    """
    cards = {tuple(str(row.environment.get(fact)) for fact in CARD_FACTS) for row in rows}
    if len(cards) > 1:
        names = "; ".join(" ".join(card) for card in sorted(cards))
        raise DifferentCardsError(
            f"times of different cards can't be compared: {names}. Give result files of one card only"
        )


def best_peer(rows: Sequence[Row], problem: Problem, mode: str = "hot") -> Row | None:
    """The fastest peer on ``problem`` in ``mode``, or None. Refuses rows of different cards."""
    check_same_card(rows)
    peers = [r for r in rows if r.kind == "peer" and r.problem == problem and r.tflops(mode) is not None]
    return max(peers, key=lambda r: r.tflops(mode) or 0.0, default=None)
