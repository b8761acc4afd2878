"""The measuring loop: whoever is wrong is not timed, this library and peers alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flash_attention
from flash_helpers.benchmark import host_time
from flash_helpers.benchmark.cases import Case, expected_output, make_inputs
from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.implementations import (
    AttentionImplementation,
    KernelImplementation,
    Prepared,
    UnavailableError,
)
from flash_helpers.benchmark.measuring import measure_checked
from flash_helpers.benchmark.peers import PEERS
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.runner import bench
from flash_helpers.benchmark.table import results_table
from flash_helpers.benchmark.timing import CpuTimer, Timing
from flash_helpers.kernel_configs import get_kernel_progression_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.report import write_report
from flash_helpers.test.reference import reference as float64_reference

CPU = torch.device("cpu")
SMALL = Problem(DType.FP16, 1, 2, 64, 128)
QUICK = Plan(rounds=1, modes=("hot",))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 2, 20, 33, 4, 2, causal=True),
        Case("causal", 1, 9, 5, 2, 2, causal=True),  # queries before the first key see none
        Case("window", 1, 40, 40, 2, 2, causal=True, window=7),
        Case("window", 2, 8, 50, 4, 1, window=3),
        Case("decode", 3, 1, 70, 8, 2),
        Case("variable length", 4, 30, 30, 4, 2, causal=True, window=9, lengths=(30, 0, 1, 17)),
    ],
)
def test_expected_outputs_equal_the_float64_reference(case: Case) -> None:
    x = make_inputs(case, CPU)
    pieces = [(x.q, x.k, x.v)]
    if case.lengths:
        pieces = [
            tuple(t[None] for t in one)  # type: ignore[misc]
            for one in zip(*(t.split(case.lengths) for t in (x.q, x.k, x.v)), strict=True)
        ]
    exact = [float64_reference(q, k, v, causal=case.causal, window=case.limits)[0] for q, k, v in pieces]
    expected = torch.cat([one[0] for one in exact]) if case.lengths else exact[0]
    assert (expected_output(case, x) - expected).abs().max() < 1e-5


def test_right_windows_are_cut_by_the_causal_mask() -> None:
    q, k, v = Problem(DType.FP16, 1, 1, 12, 64).inputs(CPU)
    assert torch.equal(reference(q, k, v, True, (3, 2)), reference(q, k, v, False, (3, 0)))
    exact, _ = float64_reference(q, k, v, window=(3, 2))
    assert (reference(q, k, v, False, (3, 2)) - exact).abs().max() < 1e-5


def outcome(call: Any) -> Any:
    """What the loop says of one contestant on a small problem."""
    q, k, v = SMALL.inputs(CPU)
    found = measure_checked(
        {"one": partial(call, q, k, v)}, lambda: reference(q, k, v), SMALL.dtype, CPU, CpuTimer(), QUICK, "x"
    )
    return found["one"]


def test_each_kind_of_outcome() -> None:
    def right(q: Any, k: Any, v: Any) -> Prepared:
        return Prepared(lambda: (reference(q, k, v).half(), "lse"), ran=lambda: "a kernel")

    def absent(q: Any, k: Any, v: Any) -> Prepared:
        raise UnavailableError("not here")

    def other_shape(q: Any, k: Any, v: Any) -> Prepared:
        return Prepared(lambda: q[:, :8])

    good = outcome(right)
    assert (good.status, good.kernel, list(good.timings)) == ("ok", "a kernel", ["hot"])
    assert good.error is not None
    assert good.error < 1e-3
    gone = outcome(absent)
    assert (gone.status, gone.reason, gone.timings) == ("unavailable", "not here", {})
    cut = outcome(other_shape)
    assert (cut.status, cut.timings) == ("failed", {})
    assert "the output has shape (1, 8, 2, 128)" in cut.reason


def test_who_leaves_the_output_unwritten_is_wrong() -> None:
    """Memory that the allocator hands out again holds no right result."""

    def idle(q: Any, k: Any, v: Any) -> Prepared:
        return Prepared(lambda: torch.empty_like(q))

    assert outcome(idle).status == "wrong"


def test_a_wrong_kernel_of_ours_is_not_timed_and_right_peers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_attention.attention
    monkeypatch.setattr(flash_attention, "attention", lambda *x, **options: 1.05 * right(*x, **options))
    monkeypatch.setattr(flash_attention, "forward", lambda config, q, k, v, o: o)  # writes nothing
    config = get_kernel_progression_configs()[0]
    others = [PEERS["sdpa-cpu"], AttentionImplementation()]
    rows = bench([SMALL], [config], others, device=CPU, plan=QUICK).rows
    assert {row.implementation: row.status for row in rows} == {
        "sdpa-cpu": "ok", "attention": "wrong", KernelImplementation.of(config, SMALL).name: "wrong",
    }  # fmt: skip
    assert [row.implementation for row in rows if row.timings] == ["sdpa-cpu"]
    assert [row.to_json().get("status") for row in rows] == [None, "wrong", "wrong"]


def test_a_row_of_attention_says_which_kernel_ran(tmp_path: Path) -> None:
    others = [AttentionImplementation(), PEERS["sdpa-cpu"]]
    results = bench([SMALL], [], others, device=CPU, plan=QUICK)
    ran, peer = results.rows
    kernel = flash_attention.last_kernel()
    assert kernel is not None
    assert (ran.kernel, peer.kernel) == (kernel.short_form(), "")
    assert ran.to_json()["kernel"] == kernel.short_form()
    results.save(tmp_path / "result.json")
    assert Results.load(tmp_path / "result.json").rows == results.rows
    unnamed = ran.to_json()
    del unnamed["kernel"]
    assert Row.from_json(unnamed) == replace(ran, kernel="")
    names = [str(cell) for cell in results_table(results).columns[1].cells]
    assert names == [f"attention, which ran {kernel.short_form()}", "sdpa-cpu"]
    write_report([tmp_path / "result.json"], tmp_path)
    page = (tmp_path / "index.html").read_text().replace("<wbr>", "")
    assert f"<td>attention, which ran {kernel.short_form()}</td>" in page


def test_what_attention_chooses_is_built_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    x = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr("flash_attention.call.problem_of", lambda *a: "the problem")
    monkeypatch.setattr(flash_attention, "prepare", lambda problems, where: seen.append(f"{problems}"))
    monkeypatch.setattr(flash_attention, "attention", lambda *x, **options: seen.append("call"))
    AttentionImplementation().prepare(SMALL, x, x, x).call()  # type: ignore[arg-type]
    assert seen == ["['the problem']", "call"]


def test_host_times_are_of_right_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "attention", lambda q, k, v, **options: v)
    found = host_time.host_times([AttentionImplementation(), PEERS["sdpa-cpu"]], CPU, rounds=1)
    assert isinstance(found["sdpa-cpu"], Timing)
    assert str(found["attention"]).startswith("wrong: relative error")
