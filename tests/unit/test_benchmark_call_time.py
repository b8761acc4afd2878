"""The benchmark of call times: its rows, its figures, who is not timed, a tiny run on the CPU."""

from __future__ import annotations

import torch

import flash_attention
from flash_helpers.benchmark import call_time
from flash_helpers.benchmark.call_time import TimedCase, all_cases, host_table, measure, run
from flash_helpers.benchmark.case_row import CaseRow
from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.contestants import CONTESTANTS, Contestant, select_contestants
from flash_helpers.benchmark.measuring import Measured
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.timing import Timing

CPU = torch.device("cpu")
DENSE = Case("dense", 1, 64, 64, 2, 2)
OURS = CONTESTANTS[0]


def test_rows_cover_what_is_promised():
    cases = list(all_cases())
    host = {c.case.feature for c in cases if c.mode == "host"}
    assert host == {"dense", "decode", "variable length", "gradients"}
    call = [c.case for c in cases if c.mode == "call"]
    for causal in (False, True):
        dense = {c.seq_k for c in call if c.feature == "dense" and c.causal == causal}
        assert dense == {64, 128, 256, 512, 1024}
    assert {c.seq_q for c in call if c.feature == "decode"} == {1}


def reasons(row, status):
    """Of those contestants that have a status."""
    return {r["implementation"]: r["reason"] for r in row.to_rows() if r.get("status") == status}


def test_ratios():
    timed = {name: Measured(timings={"host": Timing.of([ms])}) for name, ms in (("ours", 2.0), ("fa2", 8.0))}
    row = CaseRow(DENSE, "host", timed)
    assert row.over("ours", "fa2") == 0.25
    assert row.over("ours", "fa3") is None


def test_a_wrong_peer_is_not_timed():
    wrong = Contestant("fa2", lambda case, x: lambda: 2 * x.v)
    row = measure(TimedCase("host", DENSE), CPU, [OURS, wrong], rounds=1).outcome
    assert list(row.milliseconds) == ["ours", "forward", "attention, Ampere"]
    assert "relative error" in reasons(row, "wrong")["fa2"]


def test_a_wrong_call_of_ours_is_not_timed_and_right_ones_are(monkeypatch):
    right = flash_attention.attention
    monkeypatch.setattr(flash_attention, "attention", lambda *x, **options: 1.05 * right(*x, **options))
    row = measure(TimedCase("host", DENSE), CPU, select_contestants("ours,fa2"), rounds=1).outcome
    assert list(row.milliseconds) == ["fa2", "forward"]
    assert set(reasons(row, "wrong")) == {"attention", "attention, Ampere"}
    cells = [list(column.cells) for column in host_table([row]).columns]
    assert dict(zip(cells[1], cells[2], strict=True))["ours"] == "wrong"


def test_gradients_are_compared_and_timed_with_their_forward_pass():
    passes = []

    def bind(case, x):
        assert x.q.requires_grad

        def call():
            passes.append(torch.is_grad_enabled())
            return flash_attention.attention(x.q, x.k, x.v, causal=case.causal)

        return call

    wrong = Contestant("fa3", lambda case, x: lambda: x.q + x.k + x.v)
    case = Case("gradients", 1, 64, 64, 2, 2, causal=True, direction="both")
    everyone = [OURS, Contestant("fa2", bind), wrong]
    row = measure(TimedCase("host", case), CPU, everyone, rounds=1).outcome
    assert list(row.milliseconds) == ["ours", "fa2"]
    assert "relative error" in reasons(row, "wrong")["fa3"]
    assert passes
    assert all(passes)
    cells = [list(column.cells) for column in host_table([row]).columns]
    assert cells[0] == ["b1 s64 h2 causal, with gradients"] * 3


def test_a_run_on_the_cpu(monkeypatch, tmp_path, capsys):
    packed = Case("variable length", 2, 8, 8, 2, 2, lengths=(8, 4))
    cases = [
        TimedCase("host", DENSE),
        TimedCase("host", packed),
        TimedCase("call", Case("decode", 1, 1, 32, 4, 2)),
    ]
    monkeypatch.setattr(call_time, "all_cases", lambda: iter(cases))
    path = tmp_path / "folder" / "times.json"
    rows = run(path, CPU, 60.0, select_contestants("ours,fa3"), rounds=1)
    written = ResultFile.load(path)
    timed = [(row["feature"], row["implementation"]) for row in written.rows if row["milliseconds"]]
    assert timed == [
        ("dense", "attention"), ("dense", "forward"), ("dense", "attention, Ampere"),
        ("variable length", "attention"), ("decode", "attention"),
    ]  # fmt: skip
    assert written.rows[-2]["problem"] == {
        "dtype": "BF16", "batch": 1, "n_heads": 4, "n_heads_kv": 2, "seq_len_q": 1, "seq_len_k": 32,
        "d_head": 128, "causal": False,
    }  # fmt: skip
    assert written.environment["gpu"] == "cpu"
    assert all("fa3" in reasons(row.outcome, "unavailable") for row in rows)
    shown = capsys.readouterr().out
    for text in ("b1 s64 h2", "attention, Ampere", "unavailable  fa3: fa3_fwd_interface is not", str(path)):
        assert text in shown.replace("\n", "")


def test_no_row_begins_after_the_time_is_over(tmp_path):
    assert run(tmp_path / "times.json", CPU, -1.0, [], rounds=1) == []
