"""The benchmark of call times: its rows, its figures, a tiny run on the CPU."""

from __future__ import annotations

import json

import torch

from flash_helpers.benchmark import call_time
from flash_helpers.benchmark.call_time import CallRow, TimedCase, all_cases, measure, run
from flash_helpers.benchmark.features import Case, Contestant
from flash_helpers.benchmark.timing import Timing

CPU = torch.device("cpu")
DENSE = Case("dense", 1, 64, 64, 2, 2)


def test_rows_cover_what_is_promised():
    cases = list(all_cases())
    assert {c.case.feature for c in cases if c.mode == "host"} == {"dense", "decode", "variable length"}
    call = [c.case for c in cases if c.mode == "call"]
    for causal in (False, True):
        dense = {c.seq_k for c in call if c.feature == "dense" and c.causal == causal}
        assert dense == {64, 128, 256, 512, 1024}
    assert {c.seq_q for c in call if c.feature == "decode"} == {1}


def test_ratios():
    row = CallRow(TimedCase("host", DENSE))
    row.milliseconds = {name: Timing.of([ms]) for name, ms in (("ours", 2.0), ("fa2", 8.0))}
    assert row.over("ours", "fa2") == 0.25
    assert row.over("ours", "fa3") is None
    assert row.to_json()["ours_over"] == {"fa2": 0.25}


def test_who_computes_something_else_is_not_timed(monkeypatch):
    wrong = Contestant("fa2", lambda case, x: lambda: 2 * x.v)
    monkeypatch.setattr(call_time, "CONTESTANTS", (call_time.CONTESTANTS[0], wrong))
    row = measure(TimedCase("host", DENSE), CPU, ["fa2"], rounds=1)
    assert list(row.milliseconds) == ["ours", "forward", "attention, Ampere"]
    assert "relative error" in row.missing["fa2"]


def test_a_run_on_the_cpu(monkeypatch, tmp_path, capsys):
    packed = Case("variable length", 2, 8, 8, 2, 2, lengths=(8, 4))
    cases = [
        TimedCase("host", DENSE),
        TimedCase("host", packed),
        TimedCase("call", Case("decode", 1, 1, 32, 4, 2)),
    ]
    monkeypatch.setattr(call_time, "all_cases", lambda: iter(cases))
    path = tmp_path / "folder" / "times.json"
    rows = run(path, CPU, 60.0, ["fa3"], rounds=1)
    document = json.loads(path.read_text())
    assert [set(row["milliseconds"]) for row in document["rows"]] == [
        {"ours", "forward", "attention, Ampere"}, {"ours"}, {"ours"},
    ]  # fmt: skip
    assert document["environment"]["gpu"] == "cpu"
    assert all("fa3" in row.missing for row in rows)
    shown = capsys.readouterr().out
    for text in ("b1 s64 h2", "attention, Ampere", "missing  fa3: ModuleNotFoundError", str(path)):
        assert text in shown.replace("\n", "")


def test_no_row_begins_after_the_time_is_over(tmp_path):
    assert run(tmp_path / "times.json", CPU, -1.0, [], rounds=1) == []
