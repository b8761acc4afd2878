"""``flash-attention explain`` on the command line: features, refusals, errors of the model, counters."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flash_helpers.cli import app
from flash_helpers.explain import explain
from flash_helpers.explain.asked import Asked, parse_window
from flash_helpers.explain.command import explain_command, explain_problem_command
from flash_helpers.explain.counters import ProfilerError, command, counter_lines, measure, parse_counters
from flash_helpers.explain.measured_cells import RESULTS, read_cells
from flash_helpers.explain.model_error import compiled_errors, time_errors
from flash_helpers.kernel_configs import device_facts, parse_kernel_name_into_config
from flash_helpers.problem import Problem
from flash_helpers.select.prediction import MODEL_ERROR

HOPPER = parse_kernel_name_into_config(
    "(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlap+ping_pong+lagged+forced_overlap+next_after_pv+sections"
)
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command line."""
    done = CliRunner().invoke(app, ["explain", *arguments])
    return done.exit_code, done.output


# ---------------------------------------------------------------- what can be asked
@pytest.mark.parametrize(
    ("options", "traits"),
    [
        (("--window", "256,0"), "window"),
        (("--window", "256"), "window"),
        (("--window=-2,300",), "window"),
        (("--causal",), "causal"),
        (("--softcap",), "softcap"),
        (("--sinks",), "sinks"),
        (("--varlen",), "varlen"),
        (("--seq-len", "1", "--seq-len-k", "1024", "--batch", "128", "--heads", "64", "--cached"), "varlen"),
        (("--seq-len", "1", "--seq-len-k", "1024", "--batch", "128", "--heads", "64", "--paged"), "paged"),
        (("--d-head", "192", "--d-head-v", "128"), ""),
        (("--heads", "32", "--heads-kv", "8", "--seq-len", "2048", "--seq-len-k", "4096"), ""),
        (("--lse",), ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_every_feature_can_be_asked_about(tmp_path: Path, options: tuple[str, ...], traits: str) -> None:
    path = tmp_path / "explained.json"
    code, output = run(*options, "--json", str(path))
    assert code == 0, output
    (written,) = json.loads(path.read_text())
    assert traits in written["chosen"]
    problem = written["problem"]
    asked = dict(zip(options[::2], options[1::2], strict=False))
    if "--heads-kv" in asked:
        assert (problem["n_heads"], problem["n_heads_kv"]) == (32, 8)
        assert (problem["seq_len_q"], problem["seq_len_k"]) == (2048, 4096)
    if "--d-head-v" in asked:
        assert (problem["d_head"], problem["d_head_v"]) == (192, 128)
    if "--lse" in options:
        assert problem["lse"]
        assert "tensor_row_sums" not in written["chosen"]


def test_a_kernel_is_explained_with_the_traits_that_the_problem_needs() -> None:
    (found,) = explain_command(HOPPER.short_form(), asked=Asked(softcap=True, window=(512, 0)))
    assert found.kernel.traits.softcap
    assert found.kernel.traits.window
    few = Asked(batch=1, heads=8, seq_len=64, seq_len_k=8192)
    (whole,) = explain_command(HOPPER.short_form(), asked=few)
    (split,) = explain_command(HOPPER.short_form(), asked=few, split=True)
    assert whole.performance is not None
    assert split.performance is not None
    assert (whole.performance.parts, whole.kernel.traits.split) == (1, False)
    assert split.performance.parts > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", "x,0"), "--window is 'x,0'; it must be LEFT,RIGHT"),
        (("--window", "1,2,3"), "it must be LEFT,RIGHT"),
        (("--heads", "6", "--heads-kv", "4"), "heads must be a multiple of heads_kv"),
        (("--seq-len-k", "-1"), "seq_len_k is -1"),
        (("--split",), "--split is about a kernel: name it first"),
        (("--results", "x.json"), "--results belongs to --model-error"),
        ((f"{HOPPER.short_form()} | sinks",), "give it as an option (--sinks)"),
        ((HOPPER.short_form(), "--d-head-v", "64"), "--d-head-v is 64, and the kernel has its own, 128"),
        ((HOPPER.short_form(), "--model-error"), "--model-error is about all kernels"),
    ],
)
def test_mistakes_are_named(options: tuple[str, ...], message: str) -> None:
    code, output = run(*options)
    assert code == 2
    assert message in " ".join(output.split())


def test_windows_are_read() -> None:
    assert parse_window("") == (None, None)
    assert parse_window("128") == (128, 128)
    assert parse_window("all,0") == (None, 0)
    assert parse_window("-2, 5") == (-2, 5)
    assert parse_window("none,-1") == (None, -1)
    assert parse_window("0, 7") == (0, 7)


# ---------------------------------------------------------------- what it must not say
def test_a_gpu_that_cannot_run_the_kernel_gets_no_bounds_and_no_waves() -> None:
    code, output = run(HOPPER.short_form(), "--device", "A100")
    assert code == 0
    assert "no: NVIDIA A100" in output
    for word in ("bound", "waves", "blocks per SM", "TFLOP/s", "predicted"):
        assert word not in output, word
    (found,) = explain_command(HOPPER.short_form(), device="A100")
    written = found.to_json()
    assert written["bounds_ms"] is written["waves"] is written["attainable_tflops"] is None


def test_what_attention_refuses_is_refused() -> None:
    code, output = run("--batch", "99999999999")
    assert code == 2
    # 16 heads x 32 blocks of 128 queries.
    assert f"{99999999999 * 16 * 32} thread blocks; one launch holds 2147483647" in " ".join(output.split())
    (found,) = explain_command(HOPPER.short_form(), batch=99999999999)
    assert found.infeasible is not None
    assert "one launch holds" in found.infeasible


def test_predicted_and_compiled_figures_bear_their_names() -> None:
    _, output = run("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    text = " ".join(output.split())
    assert "registers, compiled" in text
    assert "recorded with nvcc" in text
    assert "by compiled registers" in text
    # Nobody compiled this one: 96 keys a block.
    _, output = run(
        "(FP16, 128, 64, 96, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax", "--device", "A100"
    )
    text = " ".join(output.split())
    assert "registers, compiled" not in text
    assert "registers, predicted" in text
    assert "compiled kernels" in text
    assert "by predicted registers" in text


def test_no_reason_is_a_ratio_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = explain_problem_command()
    capsys.readouterr()
    for candidate in found.candidates[1:]:
        assert "1.00 times the chosen one's" not in candidate.reason
    near = [c.reason for c in found.candidates[1:] if "can't tell it from the chosen one" in c.reason]
    assert all("half of whose errors pass" in reason for reason in near)


# ---------------------------------------------------------------- errors of the model
def test_the_error_of_predicted_times_is_the_one_that_is_stated() -> None:
    cells, left_out = read_cells(sorted(RESULTS.glob("*.json")))
    assert len(cells) > 2000
    # All reasons that a row may be left out for. Who renames a kernel keeps its old names readable.
    no_prediction = {
        "sequences of different lengths: their blocks are not alike",
        "keys of a prompt in parts, without their number",
        "a soft cap, whose time depends on how large the scores are",
    }
    older_name = "a kernel whose name is of an older version"
    assert left_out.keys() <= no_prediction | {older_name}, left_out
    assert left_out[older_name] <= 132
    assert sum(left_out.values()) - left_out[older_name] < 0.05 * len(cells), left_out
    rows = {row.group: row for row in time_errors(cells)}
    assert rows["all"].count == len(cells)
    assert rows["all"].median <= 100 * MODEL_ERROR + 0.5
    assert rows["all"].worst < 65, rows["all"].worst_case
    for group in ("ampere, prompts", "ampere, few queries", "hopper, prompts", "hopper, few queries"):
        assert rows[group].median < 7, group
        assert 0.95 < rows[group].bias < 1.05, group


def test_the_errors_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "errors.json"
    code, output = run("--model-error", "--json", str(path))
    assert code == 0, output
    rows = json.loads(path.read_text())
    assert {row["what"] for row in rows} >= {"registers", "time"}
    assert "worst of time, all: (" in output
    assert "predicted" in output
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    code, output = run("--model-error", "--results", str(broken))
    assert code == 2
    assert "can't be read as a result file" in " ".join(output.split())


def test_recorded_kernels_of_both_generations() -> None:
    rows = {(row.what, row.group): row for row in compiled_errors()}
    for group in ("ampere, sm_80", "ampere, sm_90"):
        assert rows["registers", group].count >= 100
        assert rows["registers", group].median <= 6
    assert rows["registers", "hopper, sm_90"].worst == 0
    assert rows["instructions", "hopper, sm_90"].median < 15


# ---------------------------------------------------------------- counters
NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "hopper_forward_kernel" - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.11","127.0.0.1","hopper_forward_kernel<…>(…)","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","Command line profiler metrics","gpu__time_duration.sum","nsecond","3,210,432"
"0","4242","python3.11","127.0.0.1","hopper_forward_kernel<…>(…)","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","Command line profiler metrics","dram__bytes.sum","byte","1,203,456,789"
"0","4242","python3.11","127.0.0.1","hopper_forward_kernel<…>(…)","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","Command line profiler metrics",\
"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","%","41.25"
"0","4242","python3.11","127.0.0.1","hopper_forward_kernel<…>(…)","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","Command line profiler metrics","launch__registers_per_thread","register/thread","168"
"0","4242","python3.11","127.0.0.1","hopper_forward_kernel<…>(…)","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","Command line profiler metrics","l1tex__data_bank_conflicts_pipe_lsu.sum","","n/a"
"""
"""As the documentation of Nsight Compute describes ``--csv``; not the output of a run."""


def test_counters_stand_beside_the_prediction() -> None:
    found = explain(HOPPER, Problem(HOPPER.dtype, 16, 16, 4096, 128), device_facts("H100"))
    counters = parse_counters(NCU)
    assert counters["time"].value == 3210432
    assert counters["registers"].value == 168
    assert "bank conflicts" not in counters, "this GPU did not say"
    lines = "\n".join(counter_lines(found, counters))
    assert found.performance is not None
    assert f"time 3.2104 ms, predicted {found.performance.expected:.4f} ms" in lines
    # 1.1113 ms of exponentials by their bound, of 3.2104.
    assert "exp2 41.25 % busy, by its bound 35% of this time" in lines
    assert "DRAM bytes 1.20346e+09 byte, at least 1,073,741,824 bytes" in lines


def test_the_profiler_leaves_the_clock_alone_and_runs_one_launch() -> None:
    found = explain(HOPPER, Problem(HOPPER.dtype, 2, 4, 512, 128), device_facts("H100"))
    arguments = command("/opt/ncu", found)
    assert arguments[arguments.index("--clock-control") + 1] == "none"
    assert arguments[arguments.index("--launch-count") + 1] == "1"
    assert json.loads(arguments[-1])["seq_len_q"] == 512


def test_a_profiler_that_is_missing_or_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = explain(HOPPER, Problem(HOPPER.dtype, 2, 4, 512, 128), device_facts("H100"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProfilerError, match="ncu was not found on PATH"):
        measure(found)
    console = Console(file=io.StringIO())
    with pytest.raises(ProfilerError, match="ncu was not found on PATH"):
        explain_command(HOPPER.short_form(), device="H100", ncu=True, console=console)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    (tmp_path / "ncu").chmod(0o755)

    def ended(code: int, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(["ncu"], code, text, "")

    for code, text, message in (
        (1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may|lets this user read no"),
        (9, "==ERROR== The application returned an error code (1).", "ncu ended with 9"),
        (0, "==WARNING== No kernels were profiled.", "no table of counters"),
    ):
        with pytest.raises(ProfilerError, match=message):
            measure(found, lambda _, code=code, text=text: ended(code, text))  # type: ignore[misc]
    assert measure(found, lambda _: ended(0, NCU))["time"].unit == "nsecond"
    assert replace(found, performance=None).attainable_tflops is None
