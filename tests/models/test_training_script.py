"""The script of the pages that trains small models, in a short form."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flash_helpers.benchmark.result_file import ResultFile

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gpt", "encoder"])
def test_a_model_learns_as_with_eager_attention(
    script: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SYMBOLS", 6)  # a small language is learnt in few steps
    task = script.Task(name, layers=1, width=64, heads=4, batch=4, length=24, steps=20, rate=1e-2)
    found, _ = script.train(task, script.ours(True), 0, "cpu")
    again, _ = script.train(task, script.ours(True), 0, "cpu")
    assert found == again
    eager, _ = script.train(task, script.eager, 0, "cpu")
    assert sum(eager[-5:]) < sum(eager[:5]) - 0.05  # it learns at all
    assert max(abs(x - y) for x, y in zip(found, eager, strict=True)) < 0.02


def test_the_attentions_of_the_script_are_alike(script: ModuleType) -> None:
    """PyTorch's, eager attention and this library's, packed, on a batch with padding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    padding = torch.arange(20) >= torch.tensor([[20], [13]])
    for causal, hidden in ((True, None), (False, padding)):
        expected = script.eager(q, k, v, causal, hidden)
        shown = slice(None) if hidden is None else ~padding
        for attend in (script.pytorch, script.ours(False)):
            found = attend(q, k, v, causal, hidden)
            torch.testing.assert_close(found[shown], expected[shown], atol=2e-2, rtol=2e-2)


def test_what_the_script_writes(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figure = tmp_path / "training.json", tmp_path / "training.svg"
    sizes = [
        "--steps",
        "2",
        "--width",
        "32",
        "--layers",
        "1",
        "--length",
        "12",
        "--batch",
        "2",
        "--seeds",
        "2",
    ]
    script.main(["--device", "cpu", *sizes, "--json", str(path), "--figure", str(figure)])
    assert "two runs are equal: True" in capsys.readouterr().out
    written = ResultFile.load(path)
    assert (written.benchmark, written.direction) == ("training", "backward")
    for task in ("gpt", "encoder"):
        losses = written.facts[task]["losses"]
        assert {way: len(curves) for way, curves in losses.items()} == {
            "eager": 2,
            "pytorch": 2,
            "attention": 2,
        }
        assert all(len(curve) == 2 for curves in losses.values() for curve in curves)
    assert figure.read_text().lstrip().startswith("<?xml")
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(SystemExit):
        script.main(["--seeds", "1"])
