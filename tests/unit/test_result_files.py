"""The schema of result files, and the files that are committed."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.benchmark import result_file
from flash_helpers.benchmark.result_file import ResultFile, ResultFileError
from flash_helpers.explain.measured_cells import RESULTS

ROOT = Path(__file__).parents[2]
FILES = sorted(RESULTS.glob("*"))
QUOTED = re.compile(r"\b[a-z]\d{2,3}(?:x\d+)?-[\w*-]+\.json\b")  # the card and how many, then what
CARDS = ("gpu", "capability", "git_commit", "torch", "cuda")
ROWS = [
    {
        "implementation": name, "kind": "peer", "milliseconds": {"hot": {"median": 1.5, "rounds": 3}},
        "problem": {"dtype": "BF16", "batch": 1, "n_heads": 2, "n_heads_kv": 2, "seq_len_q": 8,
                    "seq_len_k": 8, "d_head": 64, "causal": False},
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11"},
        "gpu_state": {"temperature_c": temperature, "power_limit_w": 700.0},
    }
    for name, temperature in (("fa2", 40.0), ("cudnn", 41.0))
]  # fmt: skip


def quotations() -> dict[str, set[str]]:
    """File names, or patterns, to the documents and sources that they stand in."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.*")]
    texts += [path for folder in ("py", "src") for path in (ROOT / folder).rglob("*.*")]
    kinds = (".md", ".py", ".txt", ".cuh", ".h", ".cpp", ".cu")
    found: dict[str, set[str]] = {}
    for path in texts:
        if path.suffix in kinds:
            for name in QUOTED.findall(path.read_text(encoding="utf-8")):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_committed_file_follows_the_schema(path: Path) -> None:
    file = ResultFile.load(path)
    assert path.read_text(encoding="utf-8") == file.text(), "a row a line, facts once: load it and save it"
    assert file.rows or file.benchmark == "training"  # that has losses, and no times
    assert file.direction in result_file.PASSES
    assert not [fact for fact in CARDS if not file.environment.get(fact)]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", file.date)
    assert all((file.benchmark, file.what, file.command, file.method))
    assert {row["environment"]["gpu"] for row in file.rows} <= {file.environment["gpu"]}
    assert all(row["milliseconds"] or row.get("reason") for row in file.rows)


def test_each_committed_file_is_quoted_and_each_quoted_file_is_there() -> None:
    quoted, names = quotations(), [path.name for path in FILES]
    assert len(names) > 20
    unquoted = [name for name in names if not any(fnmatch(name, pattern) for pattern in quoted)]
    assert not unquoted, f"no document or source quotes {unquoted}: quote or remove them"
    missing = {name: where for name, where in quoted.items() if not any(fnmatch(one, name) for one in names)}
    assert not missing


def test_facts_that_rows_share_stand_in_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    ResultFile("bench", "for a test", ROWS, facts={"skipped": []}).save(path)
    lines = path.read_text().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines[-4:-2]] == [
        {k: v for k, v in row.items() if k not in ("environment", "gpu_state")}
        | {"gpu_state": {"temperature_c": row["gpu_state"]["temperature_c"]}}  # type: ignore[index]
        for row in ROWS
    ]
    document = json.loads(path.read_text())
    assert document["environment"] == {"gpu": "NVIDIA H200", "torch": "2.11"}
    assert document["gpu_state"] == {"power_limit_w": 700.0}
    read = ResultFile.load(path)
    assert read.rows == ROWS
    assert (read.direction, read.facts) == ("forward", {"skipped": []})
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [((), "direction", None, "direction is None"), ((), "card", "x", "the header has an entry 'card'"),
     (("rows", 0), "us", {}, "row 1: the row has an entry 'us'"),
     (("rows", 1), "status", "slow", "row 2: status is 'slow'"),
     (("rows", 1), "direction", "sideways",
      "row 2: direction is 'sideways'; allowed: forward, backward, both"),
     (("rows", 1), "error", float("nan"), "row 2: error: nan is no finite number"),
     (("rows", 1), "error", -1, "row 2: error: -1 is no finite number"),
     (("rows", 0, "problem"), "keys", 8, "row 1: its problem has an entry 'keys'"),
     (("rows", 0, "problem"), "causal", 1, "causal is 1"),
     (("rows", 0, "milliseconds"), "hot", {"p20": 1.0}, "row 1: median of 'hot': None is no finite number"),
     (("rows", 0, "milliseconds"), "hot", {"median": 1.0, "mean": 1.0},
      "row 1: its time 'hot' has an entry 'mean'")],
)  # fmt: skip
def test_other_entries_are_refused_by_name(
    tmp_path: Path, place: tuple[Any, ...], name: str, value: object, said: str
) -> None:
    document = json.loads(ResultFile("bench", "for a test", ROWS).text())
    target = document
    for step in place:
        target = target[step]
    target[name] = value
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ResultFileError, match=re.escape(str(path))) as raised:
        ResultFile.load(path)
    assert said in str(raised.value)


def test_an_error_that_is_no_number_is_left_to_the_reason(tmp_path: Path) -> None:
    row = {**ROWS[0], "status": "wrong", "reason": "relative error nan, allowed 0.001", "error": float("nan")}
    path = tmp_path / "result.json"
    ResultFile("bench", "for a test", [row, ROWS[1]]).save(path)
    assert "NaN" not in path.read_text()
    read = ResultFile.load(path).rows[0]
    assert "error" not in read
    assert read["reason"] == row["reason"]


def test_a_missing_part_of_the_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for name in result_file.HEADER[1:]:
        document = json.loads(ResultFile("bench", "for a test", ROWS).text())
        del document[name]
        path.write_text(json.dumps(document))
        with pytest.raises(ResultFileError, match=f"the header has no {name}"):
            ResultFile.load(path)


def test_the_page_names_every_entry() -> None:
    page = (ROOT / "docs" / "result-files.md").read_text(encoding="utf-8")
    entries = [*result_file.HEADER, *result_file.ROW, *result_file.MORE_ROW, *result_file.PROBLEM]
    entries += [*result_file.MORE_PROBLEM, *result_file.TIMES, *result_file.KINDS, *result_file.STATUSES]
    assert not [name for name in entries if f"`{name}`" not in page and f'`"{name}"' not in page]
