"""The runner of flash-attn's tests, on a small file made like theirs: what passes, fails, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_flash_attn_tests
import torch
from flash_attn_module import apply_rotary_emb, pad_input, unpad_input
from parameter_grid import grid, sample
from run_flash_attn_tests import main

from flash_attention.compat.kv_cache import rotated
from flash_helpers.kernels.families import direction_of

TESTS = """
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import unpad_input
from flash_attn.layers.rotary import apply_rotary_emb

assert torch.cuda.get_device_capability("cuda") == (9, 0)

@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("d", [32, 59])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(5, 9), (30, 30), (1000, 1000)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
def test_output(seqlen_q, seqlen_k, d, alibi, dropout_p):
    if (seqlen_q, d, alibi, dropout_p) == (30, 59, False, 0.0):
        pytest.skip()
    q = torch.randn(1, seqlen_q, 2, d, device="cuda", dtype=torch.float16, requires_grad=True)
    k = torch.randn(1, seqlen_k, 2, d, device="cuda", dtype=torch.float16, requires_grad=True)
    slopes = torch.ones(2, device="cuda") if alibi else None
    out, _, _ = flash_attn_func(
        q, k, k, dropout_p, alibi_slopes=slopes, window_size=torch.tensor((3, 100)), return_attn_probs=True
    )
    dq, dk = torch.autograd.grad(out, (q, k), out)
    assert dq.shape == q.shape and (dk == 0).all()
    assert out.shape == q.shape

def test_wrong():
    x = torch.ones(1, 4, 2, 32, device="cuda", dtype=torch.float16)
    print("seen", flash_attn_func(x, x, x).shape)
    assert (flash_attn_func(x, x, x) == 2).all()

def test_flash_attn_bwd_overflow():
    raise AssertionError("asserts nothing but gradients")
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    path = tmp_path / "test_file.py"
    path.write_text(TESTS)
    return path


def test_what_becomes_of_each_case(tests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    status = main([str(tests), "--device", "cpu", "--longest", "100", "--json", str(found), "--refused", "1"])
    assert status == 1
    output = json.loads(found.read_text())
    assert set(output) == {"test_output", "test_wrong"}
    row = output["test_output"]
    assert row["grid"] == 24
    assert row["outside"] == {"dropout_p": 12}
    assert (row["passed"], row["skipped"], row["failures"]) == (7, 1, [])
    assert row["refused"] == {"dropout_p": 1}
    assert output["test_wrong"]["passed"] == 0
    text = capsys.readouterr().out
    assert "AssertionError" in text
    assert "seen torch.Size([1, 4, 2, 32])" in text
    assert text.endswith("7 passed, 1 failed\n")


def test_a_sample_is_the_same_each_time() -> None:
    @pytest.mark.parametrize("a", [0, 1, 2])
    @pytest.mark.parametrize(("b", "c"), [(i, -i) for i in range(10)])
    def function(a: int, b: int, c: int) -> None: ...

    assert len(grid(function)) == 30
    assert all(case["b"] == -case["c"] for case in grid(function))

    def outside(case: dict) -> list[str]:
        return ["a"] * (case["a"] == 2) + ["b"] * (case["b"] == 9)

    first, second = (sample("f", function, 5, 2, outside) for _ in range(2))
    assert first.cases == second.cases
    assert len(first.cases) == 5
    assert first.outside == {"a": 10, "b": 2}  # both: counted once
    assert [argument for argument, _ in first.refused].count("a") == 2
    assert all((argument == "a") == (case["b"] != 9) for argument, case in first.refused)
    assert all(case["a"] != 2 and case["b"] != 9 for case in first.cases)


def test_packing_and_unpacking() -> None:
    x = torch.arange(2 * 5 * 3).view(2, 5, 3)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    rows, places, offsets, longest, lengths = unpad_input(x, mask)
    assert (rows == torch.cat((x[0, :2], x[1, :4]))).all()
    assert offsets.tolist() == [0, 2, 6]
    assert offsets.dtype is torch.int32
    assert (longest, lengths.tolist()) == (4, [2, 4])
    assert (pad_input(rows, places, 2, 5) == x * mask[..., None]).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_is_the_librarys(interleaved: bool) -> None:
    x, angles = torch.randn(2, 4, 3, 32).half(), torch.rand(50, 8)
    cos, sin, first = angles.cos(), angles.sin(), torch.tensor([3, 40])
    got = apply_rotary_emb(x, cos, sin, interleaved, first)
    places = first[:, None] + torch.arange(4)
    torch.testing.assert_close(got, rotated(x, cos, sin, places, interleaved), atol=1e-3, rtol=1e-3)
    assert (got[..., 16:] == x[..., 16:]).all()


def test_gradients_are_run_when_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "test_file.py", tmp_path / "found.json"
    path.write_text(GRADIENT_TESTS)
    arguments = [str(path), "--device", "cpu", "--json", str(found), "--gradients"]
    assert main(arguments) == 1
    output = json.loads(found.read_text())
    assert output["test_flash_attn_bwd_transpose"]["passed"] == 1
    assert len(output["test_gradient_is_zero"]["failures"]) == 1
    assert "left out" not in capsys.readouterr().out
    assert main(arguments[:-1]) == 0  # zeros, which say nothing
    assert "test_flash_attn_bwd_transpose" not in json.loads(found.read_text())


def test_kernels_of_chosen_cases_are_named_for_a_gpu_that_is_not_there(
    tests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(run_flash_attn_tests, "build_kernels", lambda *given: built.append(given))
    chosen = [
        "--device",
        "cpu",
        "--functions",
        "test_out",
        "--only",
        "d=32",
        "--longest",
        "100",
        "--refused",
        "0",
    ]
    assert main([str(tests), *chosen, "--build-for", "H200", "--gradients"]) == 0
    ((kernels, targets),) = built
    assert targets == [90]
    assert {direction_of(kernel).name for kernel in kernels} == {"forward", "backward"}
    found = tmp_path / "found.json"
    assert main([str(tests), *chosen, "--json", str(found)]) == 0
    (row,) = json.loads(found.read_text()).values()
    assert (row["passed"], row["skipped"]) == (
        4,
        0,
    )  # of either length, with and without slopes, none of 59 columns


GRADIENT_TESTS = """
import pytest, torch
from flash_attn import flash_attn_func

def gradient():
    x = torch.randn(3, 1, 9, 2, 32, device="cuda", dtype=torch.float16)
    q, k, v = (part.requires_grad_() for part in x.unbind())
    out = flash_attn_func(q, k, v, causal=True, deterministic=True)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

def test_flash_attn_bwd_transpose():
    assert all(grad.any() for grad in gradient())

def test_gradient_is_zero():
    assert not any(grad.any() for grad in gradient())
"""


THIRD_TESTS = """
import itertools, pytest, torch
from helpers_beside import two
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_combine

DISABLE_LOCAL = False

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_qv", [False, True])
def test_flash_attn_output(has_qv, dtype):
    for d_v, chunk in itertools.product([512, 64], [0] if DISABLE_LOCAL else [3, 0]):
        assert (d_v, chunk) == (64, 0)
        q = torch.randn(two, 9, 2, 64, device="cuda").to(torch.bfloat16).requires_grad_()
        scale = torch.ones(1) if dtype.itemsize == 1 else None
        given = {"qv": q if has_qv else None, "q_descale": scale, "num_splits": 3, "pack_gqa": True}
        out = flash_attn_func(q, q, q, window_size=[3, 5], **given)
        assert torch.autograd.grad(out, q, out)[0].any()

def test_flash_attn_combine():
    flash_attn_combine()
"""
FOURTH_TESTS = """
import torch, pytest
from flash_attn.cute.testing import three
from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

@pytest.mark.parametrize("unpad_q", [False, True])
def test_flash_attn_varlen_output(unpad_q):
    q = torch.randn(three, 9, 64, device="cuda").to(torch.bfloat16).requires_grad_()
    ends = torch.tensor([0, 1, three], dtype=torch.int32)
    used = torch.tensor([1, 1], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "seqused_q": ends.diff()} if unpad_q else {"seqused_q": used}
    out, lse = flash_attn_varlen_func(q, q, q, cu_seqlens_k=ends, window_size=(None, -1), **options)
    assert lse.shape == (9, three) and torch.autograd.grad(out, q, out)[0].shape == q.shape

@pytest.mark.parametrize("sink_dtype", [torch.float16, torch.float32])
def test_flash_attn_learnable_sink_backward_dtype(sink_dtype):
    q = torch.randn(1, 5, 2, 64, device="cuda").to(torch.bfloat16).requires_grad_()
    out, _ = flash_attn_func(q, q, q, learnable_sink=torch.zeros(2, dtype=sink_dtype))
    pytest.xfail("what the package itself lacks")
"""


def test_names_of_the_newer_packages(tmp_path: Path) -> None:
    path, found = tmp_path / "tests" / "cute" / "test_file.py", tmp_path / "found.json"
    helpers = tmp_path / "flash_attn" / "cute" / "testing.py"
    for file in (path, helpers):
        file.parent.mkdir(parents=True)
    (path.parent / "helpers_beside.py").write_text("two = 2\n")
    helpers.write_text("three = 3\n")
    arguments = [str(path), "--device", "cpu", "--json", str(found), "--gradients", "--names"]
    path.write_text(THIRD_TESTS)
    assert main([*arguments, "3"]) == 0
    (row,) = json.loads(found.read_text()).values()  # of what it may combine nothing is asked
    assert (row["passed"], row["outside"]) == (1, {"qv": 2, "q_descale": 1})
    assert row["refused"] == {"qv": 1, "q_descale": 1}  # one more has both
    path.write_text(FOURTH_TESTS)
    assert main([*arguments, "4"]) == 0
    rows = json.loads(found.read_text())
    assert rows["test_flash_attn_varlen_output"]["refused"] == {"seqused_q": 1}
    assert rows["test_flash_attn_varlen_output"]["passed"] == 1
    assert rows["test_flash_attn_learnable_sink_backward_dtype"]["refused"] == {"learnable_sink": 1}
    assert rows["test_flash_attn_learnable_sink_backward_dtype"]["skipped"] == 1
    assert main([*arguments, "4", "--part", "1/2"]) == 1  # the second half of one case each: nothing ran


ONE_KEY = """
import pytest, torch
from flash_attn import flash_attn_func

@pytest.mark.parametrize("wrong", ["nothing", "output", "dq", "dv"])
@pytest.mark.parametrize("seqlen_k", [1, 2])
def test_output(seqlen_k, wrong):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for n in (1, seqlen_k, seqlen_k))
    for n_times in range(2):
        out = flash_attn_func(q, k, v)
        assert n_times == 0 or wrong != "output"
        g = torch.randn_like(out)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
        dq = dq + (1e-6 if wrong == "nothing" else 0.1 if wrong == "dq" else 1e-6)
        dv = dv + (0.5 if wrong == "dv" else 0)
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / 8, -1)
        dq_pt, dk_pt, dv_pt = dq_ref, dk_ref, dv_ref = torch.autograd.grad(
            torch.einsum("bhqk,bkhd->bqhd", weights, v), (q, k, v), g
        )
        if n_times == 0 and wrong == "output":
            continue
        assert (dq - dq_ref).abs().max().item() <= 0.0
"""


def test_gradients_that_have_to_be_exactly_zero_are_counted_apart(tmp_path: Path) -> None:
    path, found = tmp_path / "test_file.py", tmp_path / "found.json"
    path.write_text(ONE_KEY)
    assert main([str(path), "--device", "cpu", "--gradients", "--json", str(found)]) == 1
    row = json.loads(found.read_text())["test_output"]
    assert (row["passed"], row["only_zero"]) == (0, 1)  # one key, and nothing else is wrong
    assert len(row["failures"]) == 7
    one_key = [text for text in row["failures"] if "seqlen_k=1" in text]
    kinds = ("nothing", "output", "dq", "dv")
    assert [wrong for wrong in kinds if any(f"wrong={wrong}" in text for text in one_key)] == [
        "output", "dq", "dv",
    ]  # fmt: skip
