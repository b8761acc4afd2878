"""With what status benchmarks end: 1 where something of this library is wrong or failed."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import flash_attention
from flash_helpers.benchmark import call_time, features, grid
from flash_helpers.benchmark.call_time import TimedCase
from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.cli import app

CASE = Case("dense", 1, 16, 16, 2, 2)
PROBLEM = {
    "dtype": "BF16", "batch": 1, "n_heads": 2, "n_heads_kv": 2, "seq_len_q": 16, "seq_len_k": 16,
    "d_head": 128, "causal": False,
}  # fmt: skip


def row(kind: str = "kernel", **more: Any) -> dict[str, Any]:
    return {
        "implementation": "attention",
        "kind": kind,
        "problem": PROBLEM,
        "milliseconds": {},
    } | more


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_row_of_this_library_decides(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(), row(status=status, reason="it is so"), row("peer", status="failed", reason="else")]
    with pytest.raises(typer.Exit) as ended:
        end_with(ResultFile("grid", "rows", rows))
    assert ended.value.exit_code == 1
    told = capsys.readouterr().err
    assert f"1 of 2 rows of this library have no time; the first, attention, {status}: it is so" in told


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "peer", "status": "failed", "reason": "a peer"},
        {"status": "unavailable", "reason": "not here"},
        {"status": "failed", "reason": "was screened", "stage": "screening"},
    ],
)
def test_others_do_not(more: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    end_with(ResultFile("grid", "rows", [row(), row(**more)]))
    assert capsys.readouterr().err == ""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def broken_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*tensors: Any, **options: Any) -> Any:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(flash_attention, "attention", attention)
    monkeypatch.setattr(features, "ROUNDS", 1)
    monkeypatch.setattr(features, "all_cases", lambda scale: iter([CASE]))
    monkeypatch.setattr(grid, "grid_cases", lambda: iter([CASE]))
    monkeypatch.setattr(call_time, "all_cases", lambda: iter([TimedCase("call", CASE)]))


def ran(module: str, *arguments: str) -> Any:
    command = typer.Typer()
    command.command()(importlib.import_module(f"flash_helpers.benchmark.{module}").main)
    return CliRunner().invoke(command, arguments)


@pytest.mark.usefixtures("no_gpu", "broken_attention")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("features", ("--out", ".")),
        ("grid", ("--out", ".", "--rounds", "1")),
        ("call_time", ("--json", "times.json", "--rounds", "1")),
    ],
)
def test_benchmarks_of_features_and_calls_say_that_their_own_row_failed(
    module: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = ran(module, *arguments, "--contestants", "ours,fa2")
    assert found.exit_code == 1
    assert "attention, failed: RuntimeError: it is broken" in found.stderr
    assert list(tmp_path.glob("*.json"))  # what was measured is there
    peers = ran(module, *arguments, "--contestants", "fa2,fa3")
    assert (peers.exit_code, peers.stderr) == (0, "")


@pytest.mark.usefixtures("no_gpu", "broken_attention")
def test_a_run_that_was_stopped_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any) -> Any:
        raise DeviceLostError("fa2 on it: gone")

    monkeypatch.setattr(grid, "measure_case", lost)
    found = ran("grid", "--out", str(tmp_path), "--contestants", "fa2")
    assert found.exit_code == 1
    assert "stopped: fa2 on it: gone" in found.stderr


@pytest.mark.usefixtures("no_gpu", "broken_attention")
def test_bench_says_that_its_own_row_failed() -> None:
    sizes = ("bench", "16", "64", "--batch", "1", "--heads", "1", "--rounds", "1", "--peers", "sdpa-cpu")
    found = CliRunner().invoke(app, sizes)
    assert found.exit_code == 1
    assert "1 of 1 rows of this library have no time; the first, attention, failed" in found.stderr
    peers = CliRunner().invoke(app, (*sizes, "--kernels", "none"))
    assert peers.exit_code == 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("scale", [0, 1], ids=["by the device", "as they are"])
def test_lengths_are_smaller_on_the_cpu(scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each benchmark of cases asks for the sizes that suit the device, unless the caller says."""
    asked: list[int] = []
    for module in (grid, features, call_time):
        monkeypatch.setattr(module, "run", lambda *arguments: asked.append(arguments[-1]))
        monkeypatch.setattr(module.ResultFile, "load", lambda path: ResultFile("grid", "rows", []))
    told = ("--scale", str(scale))
    assert ran("grid", "--out", str(tmp_path), *told).exit_code == 0
    assert ran("features", "--out", str(tmp_path), *told).exit_code == 0
    assert ran("call_time", "--json", str(tmp_path / "times.json"), *told).exit_code == 0
    assert asked == [scale or 16] * 3


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["invariant_cost", "mixed_batch", "trace_decode"])
def test_what_needs_a_gpu_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    main = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / f"{name}.py"))["main"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no CUDA device can be used here" in capsys.readouterr().err
