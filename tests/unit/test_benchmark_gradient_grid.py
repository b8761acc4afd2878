"""The grid of gradients: its rows, what is right, which pass is timed, a run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attention import attention
from flash_helpers.benchmark import contestants, grid
from flash_helpers.benchmark.case_row import measure_case
from flash_helpers.benchmark.cases import Case, expected_output, make_inputs
from flash_helpers.benchmark.contestants import CONTESTANTS, REPEATABLE, Contestant, fa3_call, own_call
from flash_helpers.benchmark.correctness import output_error
from flash_helpers.benchmark.gradient_cases import gradient_cases
from flash_helpers.benchmark.grid import lead, run, select_cases
from flash_helpers.benchmark.implementations import UnavailableError
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import read_cells
from flash_helpers.flops import backward_flop
from flash_helpers.kernels.device_facts import KNOWN_DEVICES
from flash_helpers.report.feature_table import feature_table
from flash_helpers.select.select import select
from flash_helpers.test.reference import reference

CPU = torch.device("cpu")
OURS, FA2 = CONTESTANTS[:2]
SMALL = Case("plain", 1, 16, 16, 2, 2, causal=True, d_head=64)


def test_rows_are_different_and_survive_a_result_file():
    cases = list(gradient_cases())
    assert len({(case.feature, case.label()) for case in cases}) == len(cases) > 60
    assert all(Case.from_json(case.feature, case.to_json(), case.direction) == case for case in cases)
    assert [case.direction for case in cases[:2]] == ["backward", "both"]
    plain = [case for case in cases if case.feature == "plain" and case.direction == "backward"]
    assert {(case.d_head, case.causal, case.seq_q) for case in plain} == {
        (d, causal, seq) for d in (64, 128, 256) for causal in (False, True) for seq in (512, 4096, 16384)
    }
    assert {case.feature for case in cases} >= {
        "packed, mixed",
        "packed, one long",
        "window",
        "grouped heads",
    }


@pytest.mark.parametrize(
    "case",
    [
        Case("window", 1, 40, 40, 2, 2, window=7, window_right=3),
        Case("window", 2, 20, 33, 2, 2, causal=True, window=9),
        Case("grouped heads", 2, 12, 12, 4, 2, causal=True),
        Case("packed", 3, 11, 11, 4, 2, causal=True, lengths=(11, 1, 6)),
        Case("head size", 1, 9, 9, 2, 2, d_head=192, d_head_v=128),
    ],
    ids=lambda case: case.feature,
)
def test_the_reference_is_the_derivative_of_that_of_the_tests(case: Case):
    x = make_inputs(replace(case, direction="backward"), CPU)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    sequences = zip(*(t.split(case.lengths) for t in leaves), strict=True) if case.lengths else ()
    parts = [tuple(t[None] for t in one) for one in sequences] or [tuple(leaves)]
    out = [reference(*part, causal=case.causal, window=case.limits)[0] for part in parts]
    out = torch.cat([o[0] for o in out]) if case.lengths else out[0]
    right = torch.autograd.grad(out, leaves, x.dout.double())
    for found, expected in zip(expected_output(case, x), right, strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_a_packed_sequence_is_judged_as_the_same_one_of_a_batch():
    right = torch.randn(1, 30, 4, 8) * torch.linspace(3, 0.1, 30)[None, :, None, None]
    found = right + 0.1 * torch.randn(1, 30, 4, 8)
    assert output_error(found[0], right[0]) == output_error(found, right)


def test_work_and_label_say_the_pass():
    forward, backward, both = (replace(SMALL, direction=d) for d in ("forward", "backward", "both"))
    assert backward.flop() == backward_flop(forward.flop())
    assert both.flop() == forward.flop() + backward.flop()
    assert backward.label() == f"{forward.label()}, gradients"
    assert both.label() == f"{forward.label()}, with gradients"
    assert (forward.problem().lse, backward.problem().lse, both.problem().lse) == (False, True, True)


def test_what_can_not_be_judged_is_refused():
    with pytest.raises(ValueError, match="direction is 'sideways'; allowed: forward, backward, both"):
        replace(SMALL, direction="sideways")
    for more in ({"softcap": 1.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="give no softcap and no sinks"):
            replace(SMALL, direction="both", **more)
    case = replace(SMALL, direction="backward")
    with pytest.raises(UnavailableError, match="no backward pass"):
        fa3_call(case, make_inputs(case, CPU))


@pytest.mark.parametrize(("direction", "passes"), [("backward", 1), ("both", 3)])
def test_gradients_alone_are_of_one_forward_pass(direction: str, passes: int):
    calls = []

    def bind(case, x):
        def call():
            calls.append(torch.is_grad_enabled())
            return attention(x.q, x.k, x.v, causal=case.causal)

        return call

    case = replace(SMALL, direction=direction)
    prepared = Contestant("fa2", bind).prepare(case, make_inputs(case, CPU))
    with prepared.context():
        found = [prepared.call() for _ in range(3)]
    assert calls == [True] * passes
    right = expected_output(case, make_inputs(case, CPU))
    for one in found:
        assert all(
            output_error(g, r).wrong_reason(case.dtype) is None for g, r in zip(one, right, strict=True)
        )


def test_the_repeatable_gradients_ask_for_it(monkeypatch):
    asked = []

    def noted(case, x, **options):
        asked.append(options)
        return own_call(case, x, **options)

    monkeypatch.setattr(contestants, "own_call", noted)
    assert REPEATABLE.bind.keywords == {"deterministic": True}
    case = replace(SMALL, direction="backward")
    row = measure_case(case, "hot", [OURS, REPEATABLE], CPU, rounds=1)
    assert set(row.milliseconds) == {"ours", REPEATABLE.name}
    assert all("backward" in row.measured[name].kernel for name in row.measured)
    assert {r["implementation"]: r["kind"] for r in row.to_rows()} == {
        "attention": "kernel", "attention, repeatable": "kernel",
    }  # fmt: skip
    assert lead(row) is None


def test_a_run_on_the_cpu(tmp_path: Path):
    small = [
        SMALL,
        Case("window", 1, 40, 40, 2, 2, causal=True, window=7, d_head=64),
        Case("packed, mixed", 2, 24, 24, 2, 1, causal=True, lengths=(24, 5), d_head=64),
    ]
    cases = [replace(case, direction=direction) for case in small for direction in ("backward", "both")]
    rows = run(tmp_path, CPU, 60.0, [OURS, FA2, REPEATABLE], cases, rounds=1, gradients=True)
    assert [row.case for row in rows] == cases
    assert all(row.measured[name].status == "ok" for row in rows for name in ("ours", REPEATABLE.name))
    assert rows[2].measured["fa2"].reason == "no packed sequences, no windows"
    path = tmp_path / grid.GRADIENTS_FILE
    written = ResultFile.load(path)
    assert (written.benchmark, written.direction) == ("grid", "backward")
    assert [row["direction"] for row in written.rows[:6]] == ["backward"] * 3 + ["both"] * 3
    shown = feature_table(path)
    assert "| plain | b1 s16 h2 d64 causal, gradients |" in shown
    assert "| plain | b1 s16 h2 d64 causal, with gradients |" in shown
    assert "attention, repeatable / ours" in shown


def test_predictions_are_held_against_gradients_alone(tmp_path: Path):
    case = Case("head size", 2, 512, 512, 8, 8, causal=True, d_head=192, d_head_v=128)
    window = Case("window", 2, 2048, 2048, 8, 8, window=512, window_right=512)
    kernels = {
        one: select(one.problem().backward(), KNOWN_DEVICES["H200"], explained=False).kernel.short_form()
        for one in (case, window)
    }
    rows = [
        {
            "implementation": "attention", "kind": "kernel", "feature": one.feature, "problem": one.to_json(),
            "kernel": kernels[one], "direction": direction, "milliseconds": {"hot": {"median": 1.0}},
            "environment": {"gpu": KNOWN_DEVICES["H200"].name},
        }
        for one in (case, window)
        for direction in ("backward", "both")
    ]  # fmt: skip
    path = tmp_path / "rows.json"
    ResultFile("grid", "for a test", rows, direction="backward").save(path)
    cells, left_out = read_cells([path])
    assert left_out == {}
    assert [cell.problem.direction for cell in cells] == ["backward", "backward"]
    assert (cells[0].problem.d_head, cells[0].problem.d_head_v) == (192, 128)
    assert (cells[1].problem.left, cells[1].problem.right) == (512, 512)


def test_features_by_name():
    assert select_cases("", gradients=True) is None
    assert {case.feature for case in select_cases("plain", gradients=True)} == {"plain"}
    with pytest.raises(ValueError, match="unknown feature 'soft cap'; known: packed, mixed"):
        select_cases("soft cap", gradients=True)
