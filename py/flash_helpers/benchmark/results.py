"""Measured rows, and the JSON files that hold them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.timing import Timing
from flash_helpers.content import CONTENT_ERRORS, ContentError, amount, read_json, typed
from flash_helpers.kernels.direction import FORWARD
from flash_helpers.problem import Problem

SCHEMA = 1

# What must be equal before two times may be compared.
CARD_FACTS = ("gpu", "capability")


class DifferentCardsError(ValueError):
    """Rows of different cards were to be compared."""


class ResultFileError(ValueError):
    """A file is no result file of a known schema."""


class OtherSchemaError(ResultFileError):
    """A file holds something else than rows of a benchmark, or rows of another version."""


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
        direction: what was computed; rows of earlier versions are of ``forward``.
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
    direction: str = FORWARD

    @property
    def shown_name(self) -> str:
        """For tables: the implementation, and the kernel that it chose."""
        return f"{self.implementation}, which ran {self.kernel}" if self.kernel else self.implementation

    def tflops(self, mode: str = "hot") -> float | None:
        """10^12 FLOP a second by the median time of ``mode``; None when it was not measured."""
        timing = self.timings.get(mode)
        return self.problem.flop() / timing.median / 1e9 if timing else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the derived TFLOP/s for readers that do not know the formula."""
        rates = {mode: self.tflops(mode) for mode in self.timings}
        return {
            "implementation": self.implementation,
            "kind": self.kind,
            "problem": self.problem.to_json(),
            "status": self.status,
            "reason": self.reason,
            "error": self.error,
            "milliseconds": {mode: timing.to_json() for mode, timing in self.timings.items()},
            "tflops": rates,
            "gpu_state": self.gpu_state,
            "environment": self.environment,
            "kernel": self.kernel,
            "direction": self.direction,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """The inverse of ``to_json``. Raises one of ``CONTENT_ERRORS`` where the values are no row."""
        error = values["error"]
        row = cls(
            implementation=typed(values, "implementation", str),
            kind=typed(values, "kind", str),
            problem=Problem.from_json(values["problem"]),
            status=typed(values, "status", str),
            reason=typed(values, "reason", str),
            error=error if error is None else float(typed(values, "error", (int, float))),
            timings={mode: Timing.from_json(t) for mode, t in typed(values, "milliseconds", dict).items()},
            gpu_state=typed(values, "gpu_state", dict),
            environment=typed(values, "environment", dict),
            # Files of earlier versions do not have it.
            kernel=typed(values, "kernel", str) if "kernel" in values else "",
            direction=typed(values, "direction", str) if "direction" in values else FORWARD,
        )
        for mode in row.timings:
            amount(row.tflops(mode))
        return row


@dataclass
class Results:
    """The rows of a run, with the card's measured ceilings.

    Attributes:
        rows: in the order measured.
        matrix_tflops: measured rate of a large matrix product by dtype name, TFLOP/s.
        extra: further sections by name, plain JSON values.
    """

    rows: list[Row] = field(default_factory=list)
    matrix_tflops: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what a result file holds."""
        return {
            "schema": SCHEMA,
            "matrix_tflops": self.matrix_tflops,
            "rows": [row.to_json() for row in self.rows],
            **self.extra,
        }

    def save(self, path: Path) -> None:
        """Writes the file in one step: a reader or an interruption never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file that ``save`` wrote.

        Raises:
            OtherSchemaError: JSON of another schema.
            ResultFileError: no such file, no JSON, or a broken row.
        """
        try:
            document = read_json(path)
        except (OSError, ContentError) as error:
            raise ResultFileError(f"{path} can't be read as a result file: {error}") from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            what = "is no result file" if found is None else f"has schema {found}"
            raise OtherSchemaError(
                f"{path} {what}; this version reads files of schema {SCHEMA}, as bench --json and ladder "
                "write them"
            )
        known = ("schema", "matrix_tflops", "rows")
        try:
            return cls(
                rows=[Row.from_json(values) for values in typed(document, "rows", list)],
                matrix_tflops={n: amount(rate) for n, rate in typed(document, "matrix_tflops", dict).items()},
                extra={key: value for key, value in document.items() if key not in known},
            )
        except CONTENT_ERRORS as error:
            raise broken_rows(path, error) from error


def broken_rows(path: Path, error: Exception) -> ResultFileError:
    """What to raise where rows of a result file can't be read."""
    return ResultFileError(
        f"{path} has schema {SCHEMA} but a broken row ({error!r}): it was changed, or written by another "
        "version; measure again"
    )


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
