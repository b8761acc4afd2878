"""FLOP, correctness, rows and files of the benchmark."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

from flash_helpers.benchmark.correctness import output_error, reference
from flash_helpers.benchmark.implementations import Prepared
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.milestone import Milestone
from flash_helpers.benchmark.milestone import run as run_milestone
from flash_helpers.benchmark.peers import PEERS, select_peers
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.result_file import shown_command
from flash_helpers.benchmark.results import (
    DifferentCardsError,
    ResultFileError,
    Results,
    Row,
    best_peer,
    check_same_card,
)
from flash_helpers.benchmark.runner import bench
from flash_helpers.benchmark.table import ratio_to_best_peer, results_table
from flash_helpers.benchmark.timing import CpuTimer, Timing
from flash_helpers.flops import attention_bytes, attention_flop, visible_pairs
from flash_helpers.kernel_configs import get_kernel_progression_configs, get_kernels_to_build
from flash_helpers.kernel_selection import closest_short_forms, select_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import NotEnoughMemoryError, Problem, grid

CPU = torch.device("cpu")
SMALL = Problem(DType.BF16, batch=1, heads=2, seq_len=64, d_head=64)


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window",
    [(None, None), (2, None), (2, 1), (0, 0), (-2, None), (None, -1), (4, -2), (-1, 3), (-2, 1), (-20, None)],
)
def test_visible_pairs_equal_the_count_over_all_pairs(
    seq_len_q: int, seq_len_k: int, causal: bool, window: tuple[int | None, int | None]
) -> None:
    def visible(i: int, j: int) -> bool:
        position = i + seq_len_k - seq_len_q
        left, right = window
        return (
            (not causal or j <= position)
            and (left is None or j >= position - left)
            and (right is None or j <= position + right)
        )

    expected = sum(visible(i, j) for i, j in product(range(seq_len_q), range(seq_len_k)))
    assert visible_pairs(seq_len_q, seq_len_k, causal, window) == expected


def test_flop_and_bytes_by_hand() -> None:
    assert visible_pairs(4096, 4096, causal=True) == 4096 * 4097 // 2
    assert attention_flop(16, 16, 128, 4096 * 4096) == 4 * 16 * 16 * 128 * 4096 * 4096
    # Q and O: 2 * 4 heads * 10 rows; K and V: 2 * 2 heads * 20 rows; of 64 elements of 2 bytes.
    assert attention_bytes(1, 4, 2, 10, 20, 64) == 64 * 2 * (2 * 4 * 10 + 2 * 2 * 20)


@pytest.mark.parametrize(
    ("seq_len", "seq_len_k", "causal"), [(33, 33, True), (20, 41, False), (33, 33, False)]
)
def test_reference_equals_sdpa_in_float64(seq_len: int, seq_len_k: int, causal: bool) -> None:
    problem = Problem(DType.FP16, 2, 4, seq_len, 64, causal, heads_kv=2, seq_len_k=seq_len_k)
    q, k, v = problem.inputs(CPU)
    views = [x.double().transpose(1, 2) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*views, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert (reference(q, k, v, causal) - expected).abs().max() < 1e-5


def test_reference_of_rows_without_visible_keys_is_zero() -> None:
    problem = Problem(DType.FP16, 1, 1, 5, 64, True, seq_len_k=2)
    out = reference(*problem.inputs(CPU), causal=True)
    assert out[0, :3].abs().max() == 0
    assert out[0, 3:].norm(dim=-1).min() > 0


def test_one_wrong_row_of_many_and_a_nan_are_noticed() -> None:
    ref = reference(*Problem(DType.FP16, 1, 4, 512, 64).inputs(CPU))
    assert output_error(ref.half(), ref).wrong_reason(DType.FP16) is None
    one_row = ref.half()
    one_row[0, 300, 2] *= 1.02
    assert "worst row" in (output_error(one_row, ref).wrong_reason(DType.FP16) or "")
    one_nan = ref.half()
    one_nan[0, 300, 2, 5] = float("nan")
    assert output_error(one_nan, ref).wrong_reason(DType.FP16) is not None
    with pytest.raises(ValueError, match="shape"):
        output_error(ref[:, :8], ref)


def test_a_row_that_nearly_cancels_is_compared_with_rows_of_its_place() -> None:
    """As gradients under a causal mask: the first rows are large, and one of them is small by chance."""
    generator = torch.Generator().manual_seed(0)
    large = (torch.arange(2048).float() + 1).rsqrt()[None, :, None, None]
    ref = torch.randn(1, 2048, 8, 64, generator=generator) * large
    ref[0, 1, 3] /= 15
    found = ref.clone()
    found[0, 1, 3] += 0.02 * ref[0, 1, 2]  # of a typical row there
    assert output_error(found, ref).wrong_reason(DType.BF16) is None
    found[0, 1, 3] += 0.1 * ref[0, 1, 2]
    assert "worst row" in (output_error(found, ref).wrong_reason(DType.BF16) or "")


def test_a_problem_that_does_not_fit_is_refused_with_the_bytes_wanted() -> None:
    problem = Problem(DType.FP16, 64, 64, 1 << 20, 128)
    with pytest.raises(NotEnoughMemoryError, match=f"{problem.bytes_wanted(1):,} bytes"):
        problem.check_memory(CPU, free=1 << 34)
    with pytest.raises(NotEnoughMemoryError):
        bench([problem], [], [Fake("right")], device="cpu")


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="seq_len is 0"):
        Problem(DType.FP16, 1, 1, 0, 64)
    with pytest.raises(ValueError, match="no multiple"):
        Problem(DType.FP16, 1, 4, 8, 64, heads_kv=3)


def test_grid_keeps_the_work_alike() -> None:
    problems = grid([DType.FP16], [512, 16384], [64, 128], (False, True))
    assert {p.batch * p.seq_len for p in problems} == {16384}
    assert {p.heads * p.d_head for p in problems} == {2048}
    assert len(problems) == 8


def test_unknown_names_get_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="known: fa2, cudnn"):
        select_peers("fa2,fa9")
    with pytest.raises(ValueError, match="Close to it") as error:
        select_configs("(FP16, 128, 64, 64, 4): async+swizled+load_0_0_0_tiles")
    assert "(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles" in str(error.value)
    assert select_peers("none") == []


def test_selected_sets() -> None:
    ladder = get_kernel_progression_configs()
    assert select_configs("ladder") == ladder
    assert select_configs("ampere") == get_kernels_to_build()
    sets = ("ampere", "hopper", "ampere_backward", "hopper_backward")
    assert set(select_configs("all")) == {config for name in sets for config in select_configs(name)}
    assert select_configs("; ".join(c.short_form() for c in ladder[:2])) == ladder[:2]
    assert closest_short_forms(ladder[3].short_form(), 1) == [ladder[3].short_form()]


@dataclass(frozen=True)
class Fake:
    """An implementation that is right, scaled wrongly, raising, or absent."""

    name: str
    scale: float = 1.0
    error: str = ""
    absent: str | None = None
    kind: str = "peer"

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        return self.absent

    def prepare(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Prepared:
        if self.error:
            raise RuntimeError(self.error)
        return Prepared(lambda: (self.scale * reference(q, k, v, problem.causal)).to(q.dtype))


def test_what_is_wrong_absent_or_broken_is_not_timed() -> None:
    fakes = [
        Fake("right"),
        Fake("wrong", scale=1.05),
        Fake("broken", error="boom"),
        Fake("absent", absent="no"),
    ]
    seen: list[Row] = []
    results = bench(
        [SMALL], [], fakes, device="cpu", plan=Plan(rounds=2, modes=("hot", "graph")), on_row=seen.append
    )
    rows = {row.implementation: row for row in results.rows}
    assert seen == results.rows
    assert {name: row.status for name, row in rows.items()} == {
        "right": "ok",
        "wrong": "wrong",
        "broken": "failed",
        "absent": "unavailable",
    }
    assert list(rows["right"].timings) == ["hot"]  # a CPU has no graphs
    assert not rows["wrong"].timings
    assert "boom" in rows["broken"].reason
    assert results.matrix_tflops == {}  # a processor's rate of a matrix product is no ceiling


class LostTimer(CpuTimer):
    """After the first mode, the device answers nothing any more."""

    def measure(self, mode: str):  # type: ignore[no-untyped-def]
        if mode == "call":
            raise DeviceLostError("gone")
        return super().measure(mode)


def test_a_lost_device_keeps_what_was_measured() -> None:
    results = Results()
    plan = Plan(rounds=2, modes=("hot", "call"))
    with pytest.raises(DeviceLostError, match="gone"):
        bench([SMALL], [], [Fake("right")], device="cpu", plan=plan, timer=LostTimer(), results=results)
    assert [list(row.timings) for row in results.rows] == [["hot"]]


def row(name: str, milliseconds: float, kind: str = "peer", gpu: str = "NVIDIA H100") -> Row:
    timing = Timing(milliseconds, milliseconds, milliseconds, 3)
    return Row(name, kind, SMALL, timings={"hot": timing}, environment={"gpu": gpu, "capability": "9.0"})


def test_ratio_is_to_the_fastest_peer() -> None:
    rows = [row("slow", 2.0), row("fast", 1.0), row("mine", 0.8, kind="kernel")]
    assert best_peer(rows, SMALL) == rows[1]
    assert ratio_to_best_peer(rows[2], rows) == pytest.approx(1.25)


def test_rows_of_different_cards_are_not_compared() -> None:
    rows = [row("a", 1.0), row("b", 1.0, gpu="NVIDIA A100")]
    with pytest.raises(DifferentCardsError, match=r"A100.*H100"):
        check_same_card(rows)
    with pytest.raises(DifferentCardsError):
        results_table(Results(rows=rows))


def test_result_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    results = Results(
        [row("a", 1.0), replace(row("b", 2.0), status="wrong", reason="x")],
        {"BF16": 700.0},
        {"k": [1]},
        [row("a", 3.0)],
    )
    results.save(path)
    assert Results.load(path) == results
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_result_files_of_gradients_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    forward = row("a", 1.0)
    gradients = replace(forward, problem=replace(forward.problem, direction="backward"))
    for rows, direction in ([gradients], "backward"), ([forward, gradients], "forward"):
        Results(rows).save(path)
        assert Results.load(path).rows == rows
        assert json.loads(path.read_text())["direction"] == direction


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 999, "rows": []}', '{"schema": 2, "rows": [{}]}']
)
def test_broken_result_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"result\.json"):
        Results.load(path)


def test_every_peer_says_why_it_is_absent_without_a_gpu() -> None:
    problem = Problem(DType.FP16, 1, 1, 64, 64)
    for name, peer in PEERS.items():
        reason = peer.unavailable_reason(problem, CPU)
        assert reason is None if name in ("sdpa", "math", "sdpa-cpu") else reason


def test_milestone_runs_every_section_and_survives_a_broken_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(config, q, k, v, o):  # type: ignore[no-untyped-def]
        if config.B_c == 32:
            raise RuntimeError("this kernel is broken")
        return o.copy_(reference(q, k, v))

    monkeypatch.setitem(sys.modules, "flash_attention", SimpleNamespace(forward=forward, attention=None))
    state = Milestone(CPU, sizes=(1, 1, 128), rounds=2)
    with Console(record=True, width=200, file=io.StringIO()) as console:
        run_milestone(state, tmp_path, minutes=5, console=console)
    text = console.export_text()
    summary = json.loads((tmp_path / "milestone.json").read_text())["facts"]["summary"]
    assert "fp16 b1 h1 s128 d128: TFLOP/s hot" in summary
    assert "bf16 b1 h1 s128 d128: TFLOP/s hot" in summary
    assert len([name for name in summary if name.startswith("ladder")]) == 7
    assert "host time of a call: forward" in summary
    assert any("this kernel is broken" in problem for problem in state.problems)
    assert text.rstrip().endswith("milestone.json")


def test_the_command_names_no_folder_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["/somewhere/bench.py", "512,1024", "--json", "/elsewhere/made/out.json", "--only", "a, b"]
    monkeypatch.setattr("sys.argv", arguments)
    assert shown_command() == "bench.py 512,1024 --json out.json --only 'a, b'"
