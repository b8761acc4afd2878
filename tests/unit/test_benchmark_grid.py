"""The grid of every feature beside every peer: its rows, what is right, who says why, a run on the CPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from flash_attention import attention
from flash_helpers.benchmark import grid
from flash_helpers.benchmark import warm_up as warm_up_module
from flash_helpers.benchmark.case_row import measure_case
from flash_helpers.benchmark.cases import Case, expected_output, make_inputs, scaled_cases
from flash_helpers.benchmark.contestants import (
    CONTESTANTS,
    Contestant,
    fa2_call,
    named_kernel,
    package_call,
)
from flash_helpers.benchmark.gradient_cases import gradient_cases
from flash_helpers.benchmark.grid import lead, refusals, run, select_cases, table_of
from flash_helpers.benchmark.grid_cases import grid_cases
from flash_helpers.benchmark.implementations import UnavailableError
from flash_helpers.benchmark.peers import PackagePeer
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.warm_up import keep_compiled, read_cases, warm_up
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.sets import choose_hopper_kernel
from flash_helpers.report.feature_table import feature_table
from flash_helpers.test.reference import reference

CPU = torch.device("cpu")
OURS, FA2 = CONTESTANTS[:2]


def test_rows_are_different_and_survive_a_result_file():
    cases = list(grid_cases())
    assert len({(case.feature, case.label()) for case in cases}) == len(cases) > 60
    assert all(Case.from_json(case.feature, case.to_json()) == case for case in cases)
    assert {case.d_head for case in cases} == {64, 80, 96, 128, 192, 256}
    assert {case.heads // case.heads_kv for case in cases} >= {1, 4, 8, 16}
    assert {case.softcap for case in cases} == {0.0, 30.0, 50.0}
    assert {case.dtype for case in cases} == set(DType)
    assert {case.seq_k for case in cases if case.feature == "few keys"} == {1, 16, 77, 256, 512}
    assert {case.seq_q for case in cases if case.feature == "chunk of queries"} == {128, 512, 2048}
    assert any(case.d_head_v == 128 and case.d_head == 192 for case in cases)
    assert any(case.window_right for case in cases)
    assert any(case.sinks for case in cases)


@pytest.mark.parametrize(
    "case",
    [
        Case("soft cap", 2, 9, 9, 4, 2, causal=True, softcap=0.5),
        Case("sinks", 1, 9, 9, 4, 2, sinks=True),
        Case("window", 1, 40, 40, 2, 2, window=7, window_right=3),
        Case("head size", 1, 9, 9, 2, 2, d_head=192, d_head_v=128, dtype=DType.FP16),
        Case("packed", 2, 9, 9, 2, 2, lengths=(9, 4), softcap=1.0, sinks=True),
    ],
    ids=lambda case: case.feature,
)
def test_the_reference_of_a_feature_is_that_of_the_tests(case):
    x = make_inputs(case, CPU)
    found = expected_output(case, x)
    assert found.shape == (*x.q.shape[:-1], case.value_size)
    sequences = zip(*(t.split(case.lengths) for t in (x.q, x.k, x.v)), strict=True) if case.lengths else ()
    parts = [tuple(t[None] for t in sequence) for sequence in sequences] or [(x.q, x.k, x.v)]
    expected = [
        reference(*part, causal=case.causal, window=case.limits, softcap=case.softcap, sinks=x.sinks)[0]
        for part in parts
    ]
    right = torch.cat([o[0] for o in expected]) if case.lengths else expected[0]
    assert torch.allclose(found.double(), right, atol=2e-6, rtol=1e-5)


def test_a_case_and_its_problem_say_the_same():
    case = Case("all", 1, 40, 40, 2, 2, window=7, window_right=3, softcap=2.0, sinks=True, d_head_v=64)
    problem = case.problem()
    assert (problem.left, problem.right) == (7, 3)
    assert (problem.softcap, problem.sinks, problem.varlen) == (True, True, False)
    assert (problem.d_head, problem.d_head_v) == (128, 64)
    assert case.label() == "b1 s40 h2 d128/64 window 7 + 3 softcap 2 sinks"
    assert case.flop() == 2 * 2 * (128 + 64) * sum(min(i + 3, 39) - max(i - 7, 0) + 1 for i in range(40))


def test_a_peer_without_a_feature_says_so():
    capped = Case("soft cap", 1, 4, 4, 1, 1, softcap=1.0)
    with pytest.raises(UnavailableError, match="no soft caps, no sinks"):
        fa2_call(capped, make_inputs(capped, CPU))
    chunk = Case("chunk", 1, 4, 8, 1, 1, causal=True)
    with pytest.raises(UnavailableError, match="aligns the mask top-left"):
        fa2_call(chunk, make_inputs(chunk, CPU))


def test_a_package_gets_what_a_case_has(monkeypatch, tmp_path: Path):
    (tmp_path / "some_package.py").write_text(
        "def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0, learnable_sink=None):\n"
        "    return (causal, window_size, softcap, learnable_sink)\n"
        "def flash_attn_varlen_func(q, k, v, causal=False, **lengths):\n"
        "    return [lengths]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    case = Case("all", 1, 4, 4, 2, 2, causal=True, window=2, softcap=3.0, sinks=True)
    x = make_inputs(case, CPU)
    # A call takes the first of several results.
    peer = PackagePeer("some", "some_package", "some-package")
    assert package_call(peer, case, x)() is True
    packed = Case("packed", 1, 4, 4, 2, 2, lengths=(4,), sinks=True)
    with pytest.raises(UnavailableError, match="no sinks"):
        package_call(peer, packed, make_inputs(packed, CPU))


def test_a_run_says_who_leads_and_why_others_are_missing(tmp_path: Path, capsys):
    def slow_call(case: Case, x):
        def call():
            for _ in range(40):
                o = attention(x.q, x.k, x.v)
            return o

        return call

    slow = Contestant("fa3", slow_call)
    cases = [Case("head size", 1, 16, 16, 2, 2), Case("soft cap", 1, 16, 16, 2, 2, softcap=4.0)]
    rows = run(tmp_path, CPU, 60.0, [OURS, FA2, slow], cases, rounds=3)
    assert [row.case for row in rows] == cases
    assert set(rows[0].milliseconds) == {"ours", "fa2", "fa3"}
    ratio = lead(rows[0])
    assert ratio == min(rows[0].over("fa2", "ours"), rows[0].over("fa3", "ours"))
    assert rows[0].over("fa3", "ours") > 5
    assert refusals(rows) == [
        "fa2: unavailable: no soft caps, no sinks (1 row)",
        refusals(rows)[1],
    ]
    assert refusals(rows)[1].startswith("fa3: wrong: relative error")
    assert len(list(table_of(rows).rows)) == 2
    written = ResultFile.load(tmp_path / grid.FILE)
    assert written.benchmark == "grid"
    assert len(written.rows) == 6
    assert written.facts["skipped"] == []
    shown = feature_table(tmp_path / grid.FILE)
    assert "| soft cap | b1 s16 h2 softcap 4 |" in shown
    assert "fa2: no soft caps, no sinks" in shown
    assert "of 1 at or above the best peer" in capsys.readouterr().out.replace("\n", " ")


def test_no_row_begins_when_the_time_is_over(tmp_path: Path):
    cases = [Case("head size", 1, 16, 16, 2, 2)]
    assert run(tmp_path, CPU, -1.0, [OURS], cases) == []
    assert ResultFile.load(tmp_path / grid.FILE).facts["skipped"] == ["head size: b1 s16 h2"]


def test_a_row_ends_with_what_there_is_when_its_time_is_over():
    case = Case("head size", 1, 16, 16, 2, 2)
    row = measure_case(case, "hot", [OURS], CPU, rounds=10**6, seconds=0.2)
    assert 1 <= row.milliseconds["ours"].rounds < 10**6


def test_features_by_name():
    assert select_cases("") is None
    assert {case.feature for case in select_cases("soft cap, packed")} == {
        "soft cap", "packed, mixed", "packed, equal", "packed, tiny", "packed, one long",
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"unknown feature 'hard cap'; known: few blocks; soft cap; .*packed, mixed"
    ):
        select_cases("hard cap")


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("packed, mixed", {"packed, mixed"}),
        ("packed,mixed", {"packed, mixed"}),
        ("packed, one long,soft", {"packed, one long", "soft cap"}),
        ("packed, equal, packed, tiny", {"packed, equal", "packed, tiny"}),
        ("", None),
    ],
)
def test_features_whose_names_have_commas(text: str, features: set[str] | None):
    chosen = select_cases(text)
    assert (chosen and {case.feature for case in chosen}) == features


def test_cases_with_divided_lengths():
    case = Case("all", 2, 4097, 77, 2, 2, window=100, window_right=20)
    assert case.scaled(1) == case
    assert case.scaled(16) == Case("all", 2, 257, 5, 2, 2, window=6, window_right=1)
    packed = Case("packed", 3, 4100, 4100, 2, 2, lengths=(4100, 4099, 1))
    assert packed.scaled(16) == Case("packed", 3, 257, 257, 2, 2, lengths=(256, 257, 1))
    small = scaled_cases(grid_cases(), 16)
    assert {case.feature for case in small} == {case.feature for case in grid_cases()}
    assert max(case.seq_q * case.seq_k for case in small) <= 1024 * 1024
    assert len(small) == len(set(small))


def test_warming_up_spreads_the_cases_and_ends_with_its_time(monkeypatch, tmp_path: Path):
    started, killed, listed = [], [], []

    class Process:
        def __init__(self, command, **options):
            started.append(command[-4:])
            listed.append(Path(command[command.index("--cases") + 1]))

        def wait(self, timeout=None):
            if timeout is not None and len(started) == 3 and not killed:
                raise subprocess.TimeoutExpired("it", timeout)

        def kill(self):
            killed.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    for name in keep_compiled(tmp_path):
        monkeypatch.delenv(name)
    cases = [*list(grid_cases())[:8], *list(gradient_cases())[:2]]
    assert warm_up(cases, "fa4", tmp_path, jobs=3, seconds=5.0) < 5
    assert started == [["--part", str(n), "--parts", "3"] for n in range(3)]
    assert len(killed) == 1
    written = read_cases(listed[0])
    assert sorted(map(Case.label, written)) == sorted(map(Case.label, cases))
    few = [
        i
        for i, case in enumerate(written)
        if case.feature == "few blocks" and case.causal and case.d_head == 128
    ]
    assert few == list(range(few[0], few[0] + 3))  # one kernel serves their lengths: they are in one process


def test_a_named_kernel_is_timed_where_it_can_compute_the_row():
    case = Case("head size", 1, 16, 16, 2, 2, causal=True)
    config, _ = choose_hopper_kernel(DType.FP16, 128, False, 4096)
    named = named_kernel(config.config)
    assert named.name == config.short_form()
    row = measure_case(case, "hot", [OURS, named], CPU, rounds=1)
    assert row.measured[named.name].status == "ok"
    assert "BF16" in row.measured[named.name].kernel  # the type of the row, with a counter under a mask
    assert "dynamic" in row.measured[named.name].kernel
    assert lead(row) is None  # nobody else's kernel
    assert row.to_rows()[1]["implementation"] == named.name
    other = Case("head size", 1, 16, 16, 2, 2, d_head=256)
    with pytest.raises(UnavailableError, match="head size"):
        named.bind(other, make_inputs(other, CPU))


def test_a_folder_of_compiled_kernels_that_the_caller_names_stays(monkeypatch, tmp_path: Path):
    names = list(keep_compiled(tmp_path / "first"))
    for name in names:
        monkeypatch.setenv(name, "the caller's")
    keep_compiled(tmp_path / "other")
    assert [os.environ[name] for name in names] == ["the caller's"] * len(names)


def test_the_parts_of_warming_up_are_all_cases(monkeypatch, tmp_path: Path):
    listed = tmp_path / "cases.json"
    cases = list(grid_cases())
    listed.write_text(json.dumps([[case.feature, case.to_json(), case.direction] for case in cases]))
    called = []
    monkeypatch.setattr(warm_up_module, "run", lambda some, name: called.append(list(some)))
    for part in range(5):
        warm_up_module.main("fa4", listed, part, 5)
    assert list(itertools.chain(*called)) == cases
    assert max(map(len, called)) - min(map(len, called)) <= 1
