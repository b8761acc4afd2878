"""benchmarks/attention_gym.py runs a speed script as it is, with two functions by one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.content import read_json

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch

def flex_attention(q, k, v, score_mod, block_mask):
    if score_mod is broken:
        raise RuntimeError("no such thing here")
    scores = score_mod((q @ k.mT).float() / q.shape[-1] ** 0.5, None, None, None, None)
    return torch.softmax(scores, -1).half() @ v

def do_bench(function):
    function()
    return {"causal": 5.0, "mask": 7.0}.get(function.__name__, 3.0)

def double(score, b, h, q, k):
    return score * 2

def broken(score, b, h, q, k):
    return score + 1

AVAILABLE_EXAMPLES = {
    "double": lambda: test_mask(score_mod=double, S=48),
    "broken": lambda: test_mask(score_mod=broken, S=32),
}

def test_mask(score_mod=None, B=1, H=2, S=64, D=16, print_mask=True):
    assert not print_mask
    qkv = [torch.randn(B, H, S, D, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    def causal():
        return qkv[0] * 1
    def mask():
        return torch.softmax((qkv[0] @ qkv[1].mT).float() / D**0.5 * 2, -1).half() @ qkv[2]
    def flex():
        return flex_attention(*qkv, score_mod=score_mod, block_mask=None)
    for attention in (causal, mask, flex):
        do_bench(attention)
        out = attention()
        def gradients():
            out.sum().backward(retain_graph=True)
        do_bench(gradients)
    if score_mod is double:
        torch.testing.assert_close(flex(), mask(), atol=2e-2, rtol=1e-2)
"""


def _run(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    program = [
        sys.executable,
        "benchmarks/attention_gym.py",
        str(folder),
        "--json",
        str(output),
        "--rounds",
        "2",
    ]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_both_run_the_script_and_a_failure_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "benchmark.py").write_text(SCRIPT)
    output = tmp_path / "gym.json"
    ended = _run(tmp_path, output)
    assert ended.returncode == 0, ended.stderr
    assert "double" in ended.stdout
    rows = {(r["feature"], r["implementation"], r["direction"]): r for r in ResultFile.load(output).rows}
    names = ("attention", "flex_attention", "causal FA2", "F.sdpa + mask")
    assert set(rows) == {
        (f, n, d) for f in ("double", "broken") for n in names for d in ("forward", "backward")
    }
    assert rows["double", "attention", "forward"]["milliseconds"]["hot"]["median"] == 3.0
    assert rows["double", "flex_attention", "backward"]["milliseconds"]["hot"]["rounds"] == 2
    assert rows["double", "causal FA2", "forward"]["milliseconds"]["hot"]["median"] == 5.0
    assert rows["double", "F.sdpa + mask", "forward"]["milliseconds"]["hot"]["median"] == 7.0
    assert rows["double", "attention", "forward"]["problem"]["seq_len_q"] == 48
    assert rows["broken", "flex_attention", "forward"]["status"] == "failed"
    assert "no such thing here" in rows["broken", "flex_attention", "forward"]["reason"]
    assert "status" not in rows["broken", "attention", "forward"]
    assert read_json(output)["benchmark"] == "attention_gym"


def test_a_folder_without_the_script_is_refused(tmp_path: Path) -> None:
    ended = _run(tmp_path, tmp_path / "gym.json")
    assert ended.returncode == 2
    assert "name a checkout of attention-gym" in ended.stderr
