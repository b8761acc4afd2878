"""The one schema of result files: facts once in a header, then a row a line.

``docs/result-files.md`` describes it. Every benchmark of the project writes it, everything that reads
measured times reads it. A row is one implementation on one problem; times are milliseconds of one call;
sizes have the names of ``AttentionProblem``. Facts of the environment and of the GPU's state that all rows
share stand in the header alone: a reader gets them with each row.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flash_helpers.content import CONTENT_ERRORS, ContentError, amount, read_json, typed

SCHEMA = 2
FORWARD = "forward"
BOTH = "both"  # a forward pass and then its gradients, as one time
CHOICE = "attention"  # implementation of the rows of the library's own choice
METHOD = (
    "each output is compared with a float32 reference first, and what is wrong is not timed; then the "
    "contestants of a problem are measured in one process, once a round, in a new random order each round"
)
TEXTS = ("benchmark", "what", "command", "direction", "date", "method")
HEADER = ("schema", *TEXTS, "environment", "gpu_state", "facts", "rows")
SHARED = ("environment", "gpu_state")  # of rows: what all of them share stands in the header
WIDTH = 110  # a longer object of the header takes a line for each of its entries

Kind = type | tuple[type, ...]
PROBLEM: dict[str, Kind] = {
    "dtype": str, "batch": int, "n_heads": int, "n_heads_kv": int, "seq_len_q": int,
    "seq_len_k": int, "d_head": int, "causal": bool,
}  # fmt: skip
MORE_PROBLEM: dict[str, Kind] = {
    "window": int, "window_right": int, "lengths": list, "page_size": int, "d_head_v": int,
    "softcap": (int, float), "sinks": bool,
}  # fmt: skip
ROW: dict[str, Kind] = {
    "implementation": str, "kind": str, "problem": dict, "milliseconds": dict,
}  # fmt: skip
MORE_ROW: dict[str, Kind] = {
    "status": str, "reason": str, "error": (int, float), "kernel": str, "n_splits": int, "variant": str,
    "feature": str, "stage": str, "direction": str, "environment": dict, "gpu_state": dict,
}  # fmt: skip
TIMES = ("median", "p20", "p80", "rounds", "launch_hidden")
KINDS = ("kernel", "peer")
STATUSES = ("ok", "wrong", "failed", "unavailable")
PASSES = (FORWARD, "backward", BOTH)


class ResultFileError(ValueError):
    """A file is no result file of a known schema."""


class OtherSchemaError(ResultFileError):
    """A file holds something else than rows of a benchmark, or rows of another version."""


@dataclass
class ResultFile:
    """What a result file holds.

    Attributes:
        benchmark: the program that measured.
        what: what the rows are about, one sentence.
        rows: plain values, each with all its facts; see ``docs/result-files.md``.
        environment: the facts of the run, where there is no row to say them.
        facts: what else was measured or decided once, e.g. ``copy_bytes_per_second``.
        direction: which pass was measured.
        command: what was called.
        date: the day, ISO 8601.
        method: how the times were made.
    """

    benchmark: str
    what: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    direction: str = FORWARD
    command: str = field(default_factory=lambda: shown_command())
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).date().isoformat())
    method: str = METHOD

    def document(self) -> dict[str, Any]:
        """Plain values, in the order of the file."""
        shared = {name: _shared(name, self.rows) for name in SHARED}
        rows = [_without(row, shared) for row in self.rows]
        shared["environment"] = {**self.environment, **shared["environment"]}
        texts = {name: getattr(self, name) for name in TEXTS}
        return {"schema": SCHEMA, **texts, **shared, "facts": self.facts, "rows": rows}

    def text(self) -> str:
        """The file's content."""
        return _layout(self.document()) + "\n"

    def save(self, path: Path) -> None:
        """Writes the file in one step: a reader or an interruption never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self.text())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> ResultFile:
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
        try:
            check_document(document)
        except CONTENT_ERRORS as error:
            raise broken_rows(path, error) from error
        state = {name: document[name] for name in SHARED}
        rows = [
            {**row, **{name: {**state[name], **row.get(name, {})} for name in SHARED}}
            for row in document["rows"]
        ]
        texts = {name: document[name] for name in TEXTS}
        return cls(rows=rows, environment=document["environment"], facts=document["facts"], **texts)


def broken_rows(path: Path, error: Exception) -> ResultFileError:
    """What to raise where rows of a result file can't be read."""
    return ResultFileError(
        f"{path} has schema {SCHEMA} but a broken row ({error!r}): it was changed, or written by another "
        "version; measure again"
    )


def check_document(document: Any) -> None:
    """Refuses a document that does not follow the schema.

    Raises:
        ContentError: names the entry and what it is.
    """
    if missing := [name for name in HEADER if name not in document]:
        raise ContentError(f"the header has no {missing[0]}")
    _check_names("the header", document, HEADER)
    for name in TEXTS:
        typed(document, name, str)
    for name in (*SHARED, "facts"):
        typed(document, name, dict)
    for number, row in enumerate(typed(document, "rows", list), 1):
        try:
            _check_row(row)
        except CONTENT_ERRORS as error:
            raise ContentError(f"row {number}: {error}") from error


def _check_row(row: Any) -> None:
    _check_entries("the row", row, ROW, MORE_ROW)
    for name, allowed in (("kind", KINDS), ("status", STATUSES), ("direction", PASSES)):
        if row.get(name, allowed[0]) not in allowed:
            raise ContentError(f"{name} is {row[name]!r:.80}; allowed: {', '.join(allowed)}")
    if "error" in row:
        _check_amount("error", row["error"])
    _check_entries("its problem", row["problem"], PROBLEM, MORE_PROBLEM)
    for mode, times in row["milliseconds"].items():
        _check_names(f"its time {mode!r:.80}", times, TIMES)
        for name in ("median", *(name for name in times if name != "launch_hidden")):
            _check_amount(f"{name} of {mode!r:.80}", times.get(name))


def _check_amount(what: str, value: Any) -> None:
    try:
        amount(value)
    except ContentError as error:
        raise ContentError(f"{what}: {error}") from None


def _check_names(what: str, values: Any, names: Any) -> None:
    if not isinstance(values, dict):
        raise ContentError(f"{what} is {values!r:.80}")
    if unknown := [name for name in values if name not in names]:
        raise ContentError(f"{what} has an entry {unknown[0]!r}; allowed: {', '.join(names)}")


def _check_entries(what: str, values: Any, wanted: dict[str, Kind], more: dict[str, Kind]) -> None:
    _check_names(what, values, (*wanted, *more))
    for name, kind in (wanted | {name: more[name] for name in more if name in values}).items():
        typed(values, name, kind)


def shown_command() -> str:
    """The command of this process, its program and absolute paths by name: folders are a machine's."""
    program, *arguments = sys.argv or ["python"]
    return shlex.join(
        [Path(program).name, *(Path(x).name if Path(x).is_absolute() else x for x in arguments)]
    )


def _shared(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts that have one value in all rows."""
    first, *others = [row.get(name, {}) for row in rows] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def _without(row: dict[str, Any], shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row without what the header says, and without an error that is no number: its reason says that."""
    own = {
        name: {key: value for key, value in row.get(name, {}).items() if key not in shared[name]}
        for name in SHARED
    }
    left_out = SHARED if math.isfinite(row.get("error") or 0) else (*SHARED, "error")
    kept = {name: value for name, value in row.items() if name not in left_out}
    return {**kept, **{name: values for name, values in own.items() if values}}


def _layout(value: Any, indent: str = "") -> str:
    """JSON: rows one a line; an object of the header on one line where it is short."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or (len(flat) <= WIDTH and "[{" not in flat):
        return flat
    inner = indent + " "
    if isinstance(value, list):
        lines = [json.dumps(item, ensure_ascii=False) for item in value]
        return f"[\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}]"
    lines = [f"{json.dumps(name)}: {_layout(item, inner)}" for name, item in value.items()]
    return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}}}"
