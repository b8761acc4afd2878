"""The benchmark of features: its cases, its figures, who is not timed, a tiny run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_attention
from flash_helpers.benchmark import contestants, features
from flash_helpers.benchmark.case_row import measure_case
from flash_helpers.benchmark.cases import Case, make_inputs
from flash_helpers.benchmark.contestants import (
    CONTESTANTS,
    Contestant,
    package_call,
    sdpa_call,
    select_contestants,
)
from flash_helpers.benchmark.features import all_cases, rate_of, run, table_of
from flash_helpers.benchmark.implementations import UnavailableError
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.peers import PackagePeer
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.kernels.dtype import DType
from flash_helpers.report.feature_table import feature_table

CPU = torch.device("cpu")
CAUSAL = Case("causal", 1, 16, 16, 2, 2, causal=True)
OURS, FA2 = CONTESTANTS[:2]
WRONG = Contestant("wrong", lambda case, x: lambda: 2 * x.v)


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
        with pytest.raises(UnavailableError, match="no packed sequences, no windows"):
            sdpa_call(case, make_inputs(case, CPU))
    with pytest.raises(UnavailableError, match=r"no_such_module is not installed \(pip install none-such\)"):
        package_call(PackagePeer("none", "no_such_module", "none-such"), CAUSAL, make_inputs(CAUSAL, CPU))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("fa3", {}, r"fa3_fwd_interface is not installed \(pip install fa3-fwd\)"),
        ("fa3", {"direction": "backward"}, "no backward pass .*benchmarks/fa3_backward.py times"),
        ("fa3", {"dtype": DType.FP16}, "takes BF16 only .compare FP16 with the others"),
        ("fa4", {}, r"flash_attn.cute is not installed \(pip install flash-attn-4\)"),
        ("cudnn", {}, "runs on cuda only"),
    ],
)
def test_who_is_not_there_says_what_to_do(name, change, words, monkeypatch):
    monkeypatch.setattr(contestants, "is_installed", lambda module: False)
    (peer,) = select_contestants(name)
    case = replace(CAUSAL, **change)
    with pytest.raises(UnavailableError, match=words):
        peer.bind(case, make_inputs(case, CPU))


def test_a_wrong_peer_is_not_timed_and_shows_as_wrong():
    row = measure_case(CAUSAL, "hot", [OURS, WRONG], CPU, rounds=1)
    assert list(row.milliseconds) == ["ours"]
    assert "PyTorch attention on the CPU" in row.kernel  # what ran, as last_kernel says
    assert rate_of(row) > 0
    ours, wrong = row.to_rows()
    assert (ours["implementation"], wrong["implementation"]) == ("attention", "wrong")
    assert wrong["status"] == "wrong"
    assert "relative error" in wrong["reason"]
    assert "status" not in ours
    assert ours["error"] < 0.016 < wrong["error"]
    assert row.cell("wrong") == "wrong"


@pytest.mark.parametrize(
    "case", [CAUSAL, Case("variable length", 2, 16, 16, 2, 2, causal=True, lengths=(16, 9))]
)
def test_a_wrong_call_of_ours_is_not_timed_and_right_peers_are(monkeypatch, case):
    for name in ("attention", "attention_varlen"):
        right = getattr(flash_attention, name)
        monkeypatch.setattr(
            flash_attention, name, lambda *x, right=right, **options: 1.05 * right(*x, **options)
        )
    row = measure_case(case, "hot", [OURS, FA2], CPU, rounds=1)
    assert "ours" not in row.milliseconds
    assert row.to_rows()[0]["reason"].startswith("relative error 0.05")
    assert ("fa2" in row.milliseconds) == (not case.lengths)
    assert rate_of(row) == 0
    shown = [list(column.cells) for column in table_of([row], 1e9).columns]
    assert shown[2][0].startswith("wrong: relative error")


def test_a_run_on_the_cpu(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(features, "ROUNDS", 1)
    monkeypatch.setattr(features, "CONTESTANTS", (OURS, FA2, WRONG))
    every = {case.feature: case for case in all_cases(512)}
    monkeypatch.setattr(features, "all_cases", lambda scale: iter(every.values()))
    rows = run(tmp_path / "new", CPU, 60.0, [OURS, FA2, WRONG], scale=512)
    path = tmp_path / "new" / "features.json"
    written = ResultFile.load(path)
    assert len(rows) == len(every) == 5
    assert written.facts["copy_bytes_per_second"] > 0
    found = {(row["feature"], row["implementation"]): row for row in written.rows}
    assert len(found) == len(written.rows) == 15
    for case in every.values():
        assert found[case.feature, "attention"]["milliseconds"]["hot"]["median"] > 0
        assert found[case.feature, "wrong"]["status"] in ("wrong", "failed")
        assert Case.from_json(case.feature, found[case.feature, "fa2"]["problem"]) == case
    assert found["grouped heads", "fa2"]["milliseconds"]
    lines = feature_table(path).splitlines()
    assert len([line for line in lines if " GB/s" not in line and "|" in line]) == 2 + len(every)
    shown = capsys.readouterr().out
    assert "% of a copy" in shown
    assert "unavailable  fa2: no packed sequences, no windows" in shown
    assert "wrong  wrong: relative error" in shown


def test_no_row_begins_when_the_time_is_over(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(features, "ROUNDS", 1)
    monkeypatch.setattr(features, "all_cases", lambda scale: iter([CAUSAL]))
    assert run(tmp_path, CPU, -1.0, [OURS], scale=512) == []


def test_a_lost_device_keeps_what_was_measured(monkeypatch, tmp_path: Path, capsys):
    def broken(case, *arguments):
        if case.window is not None:
            raise DeviceLostError("ours on it: gone")
        return measure_case(case, *arguments)

    monkeypatch.setattr(features, "ROUNDS", 1)
    monkeypatch.setattr(features, "measure_case", broken)
    cases = [Case("decode", 1, 1, 16, 2, 2), Case("window", 1, 8, 8, 1, 1, window=2), CAUSAL]
    monkeypatch.setattr(features, "all_cases", lambda scale: iter(cases))
    rows = run(tmp_path, CPU, 60.0, [OURS], scale=512)
    assert [row.case.feature for row in rows] == ["decode"]
    assert "gone" in ResultFile.load(tmp_path / "features.json").facts["stopped"]
    assert "The CUDA context is lost" in capsys.readouterr().out


def test_contestants_by_name():
    assert [c.name for c in select_contestants("fa2, ours")] == ["ours", "fa2"]
    with pytest.raises(ValueError, match="unknown contestant 'fa9'; known: ours, fa2"):
        select_contestants("fa9")
