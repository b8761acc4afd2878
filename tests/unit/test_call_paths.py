"""The ways into the library: each computes the same, and torch.compile counts what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash_helpers.benchmark.call_paths import TEN_LENGTHS, call_paths, compile_counters, main
from flash_helpers.benchmark.result_file import ResultFile


def test_ten_lengths_make_two_graphs_and_no_break() -> None:
    counted = compile_counters(torch.device("cpu"), backend="aot_eager")
    assert len(set(TEN_LENGTHS)) == 10
    assert counted["graphs"] == [1] + [2] * 9  # the second is for any length
    assert counted["graph_breaks"] == 0
    assert counted["recompilations"] == 1


def test_a_graph_break_and_a_graph_a_length_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_helpers.benchmark import call_paths as module

    def breaking(x: torch.Tensor, *unused: object, **options: object) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * x.shape[1] if x.shape[1] in (5, 6, 7) else x

    monkeypatch.setattr(module, "attention", breaking)
    counted = compile_counters(torch.device("cpu"), "eager", lengths=(5, 6, 7))
    assert counted["graph_breaks"] >= 1
    assert counted["recompilations"] >= 2


def test_all_ways_compute_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 64, generator=generator).half() for _ in range(3))
    results = {name: call(q, k, v) for name, call in call_paths("aot_eager").items()}
    results["operator"] = results["operator"][0]
    for name, result in results.items():
        torch.testing.assert_close(result, results["attention"], atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--out", "/dev/null/x.json"], "--out is /dev/null/x.json"), (["--rounds", "0"], "rounds is 0")],
)
def test_mistakes_are_refused_first(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_wrong_way_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_helpers.benchmark import call_paths as module

    ways = {"wrong": lambda q, k, v: v, "PyTorch": module.call_paths("eager")["PyTorch"]}
    monkeypatch.setattr(module, "call_paths", lambda backend: ways)
    with pytest.raises(RuntimeError, match="the way 'wrong' is not timed, it is wrong: relative error"):
        module.call_times(torch.device("cpu"), rounds=1)


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / "paths.json"
    assert main(["--backend", "aot_eager", "--rounds", "1", "--out", str(out)]) == 0
    written = ResultFile.load(out)
    printed = capsys.readouterr().out
    assert [row["implementation"] for row in written.rows] == list(call_paths("eager"))
    assert all(row["implementation"] in printed for row in written.rows)
    assert "2 graphs, 0 graph breaks, 1 recompilations" in printed
    assert written.facts["torch_compile"]["graphs"][-1] == 2
