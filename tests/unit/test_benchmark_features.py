"""The benchmark of features: its cases, its figures, a tiny run on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from flash_helpers.benchmark import features
from flash_helpers.benchmark.features import Case, all_cases, make_inputs, measure, run, sdpa_call

CPU = torch.device("cpu")


def test_cases_cover_every_feature():
    cases = list(all_cases())
    assert {case.feature for case in cases} == {
        "causal", "window", "grouped heads", "variable length", "decode",
    }  # fmt: skip
    decode = [case for case in cases if case.feature == "decode"]
    assert {case.seq_k for case in decode if case.batch == 1} == {1024 * 2**n for n in range(8)}
    assert all(case.cache_bytes() <= features.CACHE_BYTES for case in decode)
    assert {(case.seq_q, case.window) for case in cases if case.feature == "window"} == {
        (seq, window) for seq in (8192, 16384) for window in (512, 1024, 4096)
    }


def test_figures():
    assert Case("causal", 2, 4, 4, 3, 3).flop() == 4 * 2 * 3 * 128 * 16
    assert Case("causal", 2, 4, 4, 3, 3, causal=True).flop() == 4 * 2 * 3 * 128 * 10
    assert Case("window", 1, 4, 4, 1, 1, causal=True, window=1).flop() == 4 * 128 * 7
    assert Case("variable length", 2, 4, 4, 1, 1, causal=True, lengths=(4, 1)).flop() == 4 * 128 * 11
    assert Case("decode", 2, 1, 1000, 32, 8).cache_bytes() == 2 * 2 * 1000 * 8 * 128 * 2


def test_a_peer_without_a_feature_says_so():
    for case in (
        Case("window", 1, 4, 4, 1, 1, window=2),
        Case("variable length", 1, 4, 4, 1, 1, lengths=(4,)),
    ):
        with pytest.raises(NotImplementedError):
            sdpa_call(case, make_inputs(case, CPU))


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(features, "ROUNDS", 1)
    wrong = features.Contestant("wrong", lambda case, x: lambda: 2 * x.v)
    monkeypatch.setattr(features, "CONTESTANTS", (features.CONTESTANTS[0], wrong))
    row = measure(Case("causal", 1, 16, 16, 2, 2, causal=True), CPU, ["ours", "wrong"])
    assert list(row.milliseconds) == ["ours"]
    assert "relative error" in row.missing["wrong"]
    assert row.rate > 0
    assert "causal" in row.kernel


def test_a_run_on_the_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(features, "ROUNDS", 1)
    every = {case.feature: case for case in all_cases(512)}
    monkeypatch.setattr(features, "all_cases", lambda scale: iter(every.values()))
    rows = run(tmp_path / "new", CPU, 60.0, ["ours", "fa2"], scale=512)
    written = json.loads((tmp_path / "new" / "features.json").read_text())
    assert len(rows) == len(written["rows"]) == len(every) == 5
    assert written["copy_bytes_per_second"] > 0
    assert all("ours" in row["milliseconds"] for row in written["rows"])
    grouped = next(row for row in written["rows"] if row["case"]["feature"] == "grouped heads")
    assert "fa2" in grouped["milliseconds"]
    assert "% of a copy" in capsys.readouterr().out


def test_no_row_begins_when_the_time_is_over(monkeypatch, tmp_path):
    monkeypatch.setattr(features, "ROUNDS", 1)
    monkeypatch.setattr(features, "all_cases", lambda scale: iter([Case("causal", 1, 16, 16, 2, 2)]))
    assert run(tmp_path, CPU, -1.0, ["ours"], scale=512) == []
