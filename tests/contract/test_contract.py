"""docs/contract.md, line by line: the tests of line Cnn are named test_cnn_…, here or in a file beside it."""

from __future__ import annotations

import ast
import math
import re
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flash_attention
from flash_attention.cached import attention_cached
from flash_attention.errors import InfeasibleConfigError, ModError, NoKernelError
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, device_facts
from flash_helpers.test.utils import QKVConfig, error_stats, generate_qkv, py_flash_attention, ramp, reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "contract.md"
HALF, BFLOAT = torch.float16, torch.bfloat16


def attend(q, k, v, **options):
    """``attention``; a test of what no CUDA kernel has yet is skipped there, and nowhere else."""
    try:
        return flash_attention.attention(q, k, v, **options)
    except NoKernelError as error:
        assert q.is_cuda
        pytest.skip(f"no CUDA kernel yet: {error}")


def check(q, k, v, **options):
    """Output and LSE against the float64 reference; gives the output."""
    o, lse = attend(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference(q, k, v, **options)
    tolerance = 2e-3 if q.dtype is HALF else 1.6e-2
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)
    assert lse.dtype is torch.float32
    return o


def ramps(q_shape, kv_shape, device, dtype=HALF):
    return (
        ramp(q_shape, 5, dtype, device), ramp(kv_shape, 7, dtype, device), ramp(kv_shape, 11, dtype, device)
    )  # fmt: skip


def keys(values, device, d=64, dtype=HALF):
    """(1, keys, 1, d) with one value a key."""
    return torch.tensor(values, dtype=dtype, device=device)[None, :, None, None].expand(1, -1, 1, d)


def counted(seq_q, seq_k, device):
    """q = 0 and v[j] = j + 1: outputs are means over the visible keys."""
    q = torch.zeros(1, seq_q, 1, 64, dtype=HALF, device=device)
    return q, keys([0.0] * seq_k, device), keys([j + 1.0 for j in range(seq_k)], device)


def column(o):
    return o[0, :, 0, 0].tolist()


def test_every_line_has_a_test():
    lines = re.findall(r"^\| (C\d\d) \|", DOCUMENT.read_text(), re.MULTILINE)
    files = Path(__file__).parent.glob("test_*.py")
    tests = {
        number.upper()
        for file in files
        for number in re.findall(r"^def test_(c\d\d)_", file.read_text(), re.MULTILINE)
    }
    assert len(lines) == len(set(lines))
    assert set(lines) == tests


def tests_of_lines() -> dict[str, set[str]]:
    """By line of the contract the devices that its tests run on: those of this folder, and of tests/gpu."""
    where: dict[str, set[str]] = {}
    here = Path(__file__).parent
    for file in (*here.glob("test_*.py"), *here.parent.joinpath("gpu").glob("test_*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and (found := re.match(r"test_(c\d\d)_", function.name)):
                marks = " ".join(map(ast.unparse, function.decorator_list))
                on_gpu = "mark.gpu" in marks or file.parent.name == "gpu"
                both = any(argument.arg == "device" for argument in function.args.args)
                devices = {"cpu", "cuda"} if both else {"cuda"} if on_gpu else {"cpu"}
                where.setdefault(found[1].upper(), set()).update(devices)
    return where


def test_every_line_has_a_test_on_each_device():
    """But C74: no test compares the bits of kernels yet."""
    where = tests_of_lines()
    assert {line for line, devices in where.items() if "cpu" not in devices} == set()
    assert {line for line, devices in where.items() if "cuda" not in devices} <= {"C74"}


# ---------------------------------------------------------------------- what is computed
@pytest.mark.parametrize("distribution", ["randn", "peaked", "constant", "ramp"])
@pytest.mark.parametrize("dtype", list(DType))
def test_c01_error(device, dtype, distribution):
    for causal in (False, True):
        q, k, v = generate_qkv(QKVConfig(2, 333, 2, 64, dtype, device, distribution=distribution))
        expected, _ = reference(q, k, v, causal=causal)
        error = error_stats(attend(q, k, v, causal=causal), expected)
        pytorch = error_stats(py_flash_attention(q, k, v, causal=causal), expected)
        assert error.max_abs <= 2 * pytorch.max_abs + 1e-5


@pytest.mark.parametrize(("d", "expected"), [(40, 2.346685), (72, 2.528733)])
def test_c02_scale_of_the_callers_head_size(device, d, expected):
    q = torch.ones(1, 1, 1, d, dtype=HALF, device=device)
    o = attend(q, keys([j / 8 for j in range(4)], device, d), keys([0.0, 1.0, 2.0, 3.0], device, d))
    assert o[0, 0, 0, 0].item() == pytest.approx(expected, abs=2e-3)


def test_c02_scale_values(device):
    q, k, v = ramps((1, 70, 2, 64), (1, 90, 2, 64), device)
    means = v.double().mean(1, keepdim=True).expand(q.shape)
    torch.testing.assert_close(attend(q, k, v, softmax_scale=0.0).double(), means, atol=2e-3, rtol=2e-3)
    assert column(attend(*counted(3, 7, device), causal=True, softmax_scale=0.0)) == [3.0, 3.5, 4.0]
    check(q, k, v, softmax_scale=-0.2)
    check(q, k, v, softmax_scale=1)
    same = [
        attend(q, k, v, softmax_scale=s)
        for s in (0.25, np.float32(0.25), np.float64(0.25), torch.tensor(0.25))
    ]
    assert all(torch.equal(same[0], o) for o in same)
    for bad in (math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400):  # float32 ends at 3.4e38
        with pytest.raises(ValueError, match="softmax_scale"):
            attend(q, k, v, softmax_scale=bad)
    for bad in ("0.1", 1j, torch.tensor(1j), torch.tensor([0.1])):
        with pytest.raises(TypeError, match=r"softmax_scale is .*; it must be a real number"):
            attend(q, k, v, softmax_scale=bad)


def test_c03_causal(device):
    o, lse = attend(*counted(3, 7, device), causal=True, return_lse=True)
    assert column(o) == [3.0, 3.5, 4.0]
    assert lse[0, 0].tolist() == pytest.approx([math.log(5), math.log(6), math.log(7)], abs=1e-5)
    q, k, _ = counted(129, 300, device)
    o = check(q, k, keys([j % 16 + 1.0 for j in range(300)], device), causal=True)
    assert o[0, 0, 0, 0].item() == pytest.approx(8.360465, abs=8e-3)
    assert o[0, -1, 0, 0].item() == pytest.approx(8.42, abs=8e-3)
    q, k, _ = counted(1, 4096, device)
    check(q, k, keys([j % 16 + 1.0 for j in range(4096)], device), causal=True)
    check(*ramps((2, 200, 2, 64), (2, 77, 2, 64), device), causal=True)


SIGNED_WINDOWS = [
    (-1, 5), (9, -2), (-3, None), (None, -2), (-40, 77), (60, -33), (None, -70), (-45, None),
    (-2, 1), (None, -400), (-200, None), (None, -(10**30)), (10**30, 10**30),
]  # fmt: skip


@pytest.mark.parametrize("window", [(0, 0), (3, None), (None, 2), (5, 7), (100, 50), *SIGNED_WINDOWS])
@pytest.mark.parametrize("lengths", [(90, 90), (50, 130), (130, 50), (1, 300)])
def test_c04_window(device, window, lengths):
    seq_q, seq_k = lengths
    for causal in (False, True):
        check(*ramps((1, seq_q, 2, 64), (1, seq_k, 2, 64), device), window=window, causal=causal)


def test_c04_window_values(device):
    o = attend(*counted(5, 5, device), window=(1, 2))
    assert column(o) == pytest.approx([2, 2.5, 3.5, 4, 4.5], abs=2e-3)
    o = attend(*counted(5, 5, device), window=(2, -1))
    assert column(o) == pytest.approx([0, 1, 1.5, 2.5, 3.5], abs=2e-3)
    o, lse = attend(*counted(5, 5, device), window=(-2, None), return_lse=True)
    assert column(o) == pytest.approx([4, 4.5, 5, 0, 0], abs=2e-3)
    assert lse[0, 0].tolist() == pytest.approx([math.log(3), math.log(2), 0, -math.inf, -math.inf], abs=1e-5)


@pytest.mark.parametrize("window", SIGNED_WINDOWS)
@pytest.mark.parametrize("sinks", [False, True])
def test_c04_signed_windows_over_heads_and_lengths(device, window, sinks):
    logits = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device) if sinks else None
    for seq_q, seq_k in ((1, 70), (70, 1), (200, 333)):
        check(*ramps((2, seq_q, 4, 64), (2, seq_k, 2, 64), device), window=window, sinks=logits)


@pytest.mark.parametrize(
    ("window", "error"),
    [
        ((1.5, 0), TypeError),
        ((True, 0), TypeError),
        (3, TypeError),
        ((1, 2, 3), TypeError),
    ],
)
def test_c04_bad_windows(device, window, error):
    with pytest.raises(error, match="window"):
        attend(*counted(3, 3, device), window=window)


def test_c05_softcap(device):
    q, k, v = generate_qkv(QKVConfig(1, 100, 2, 64, DType.FP16, device, distribution="peaked"))
    for cap in (1.0, 30.0):
        for causal in (False, True):
            check(q, k, v, softcap=cap, causal=causal)
    assert torch.equal(attend(q, k, v, softcap=0.0), attend(q, k, v))


def test_c05_smallest_and_largest_softcaps(device):
    q, k, v = ramps((1, 70, 2, 64), (1, 90, 2, 64), device)
    q[:, 1] = 0  # scores of 0: 0 / softcap and 0 * tanh(…) are 0
    largest = torch.finfo(torch.float32).max
    torch.testing.assert_close(attend(q, k, v, softcap=largest), attend(q, k, v), atol=4e-3, rtol=4e-3)
    means = v.double().mean(1, keepdim=True).expand(q.shape)
    for cap in (1e-30, 1e-50, 5e-324):
        torch.testing.assert_close(attend(q, k, v, softcap=cap).double(), means, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e39])
def test_c05_bad_softcaps(device, bad):
    with pytest.raises(ValueError, match="softcap"):
        attend(*counted(3, 3, device), softcap=bad)


@pytest.mark.parametrize("name", ["causal", "return_lse"])
def test_c03_flags_are_true_or_false(device, name):
    given = counted(3, 3, device)
    for bad in ("False", None, 2, [], torch.tensor(True, device=device)):
        with pytest.raises(TypeError, match=f"{name} is .*; it must be True or False"):
            attend(*given, **{name: bad})
    for value in (True, 1, np.True_):
        expected, found = (attend(*given, **{name: x}) for x in (True, value))
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_c17_a_scale_that_is_learnt_is_refused(device):
    given, scale = counted(3, 3, device), torch.tensor(0.5, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"softmax_scale requires grad.*softmax_scale\.detach"):
        attend(*given, softmax_scale=scale)
    with torch.no_grad():
        found = attend(*given, softmax_scale=scale)
    assert all(torch.equal(x, y) for x, y in zip(found, attend(*given, softmax_scale=0.5), strict=True))


@pytest.mark.parametrize("bad", [torch.tensor(1j), torch.ones(2), 1j, "1"])
def test_c02_what_is_no_number_is_refused(device, bad):
    with pytest.raises(TypeError, match=r"softmax_scale is .*; it must be a real number"):
        attend(*counted(3, 3, device), softmax_scale=bad)


@pytest.mark.parametrize("bad", [{3, 0}, "ab", 3, (1, 2, 3), None])
def test_c04_a_window_is_two_values_in_order(device, bad):
    with pytest.raises(TypeError, match=r"window is .*; it must be two values \(left, right\)"):
        attend(*counted(3, 3, device), window=bad)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_c06_sinks(device, dtype):
    q, k, v = ramps((2, 50, 4, 64), (2, 80, 2, 64), device)
    sinks = torch.tensor([-1.0, 0.0, 3.0, 20.0], dtype=dtype, device=device)
    check(q, k, v, sinks=sinks)
    check(q, k, v, sinks=sinks, causal=True, softcap=2.0, softmax_scale=0.3)
    check(q, k, v, sinks=torch.full_like(sinks, -math.inf))


def check_infinities(q, k, v, **options):
    """``check`` where NaN and infinities are expected; gives output and LSE."""
    o, lse = attend(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference(q, k, v, **options)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6, equal_nan=True)
    return o, lse


# Keys in one block, in many, and so many for one query that they are cut into parts.
LENGTHS_OF_INFINITIES = [(70, 40), (200, 513), (1, 4096)]


def infinities(lengths, device):
    """Ramps with a first column of q of 1: an infinite first column of k makes an infinite score."""
    seq_q, seq_k = lengths
    q, k, v = ramps((1, seq_q, 2, 64), (1, seq_k, 2, 64), device)
    q[..., 0] = 1.0
    return q, k, v


@pytest.mark.parametrize("lengths", LENGTHS_OF_INFINITIES)
@pytest.mark.parametrize("sink", [math.inf, -math.inf, math.nan])
def test_c06_sinks_that_are_no_numbers(device, sink, lengths):
    q, k, v = infinities(lengths, device)
    sinks = torch.tensor([sink, 0.5], device=device)
    o, lse = check_infinities(q, k, v, sinks=sinks)
    if sink == math.inf:
        assert (o[:, :, 0] == 0).all()
        assert (lse[:, 0] == math.inf).all()
    assert o[:, :, 1].isfinite().all()
    o, lse = check_infinities(q, k[:, :0], v[:, :0], sinks=sinks)
    assert (o == 0).all()  # there is nothing that NaN could spoil
    assert not math.isnan(sink) or lse[:, 0].isnan().all()
    k[..., 0] = -math.inf
    check_infinities(q, k, v, sinks=sinks)


def test_c06_bad_sinks(device):
    q, k, v = ramps((2, 50, 4, 64), (2, 80, 2, 64), device)
    with pytest.raises(ValueError, match=r"sinks has shape \(2,\)"):
        attend(q, k, v, sinks=torch.zeros(2, device=device))
    with pytest.raises(TypeError, match=r"sinks is torch\.float64"):
        attend(q, k, v, sinks=torch.zeros(4, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match="sinks is on meta"):
        attend(q, k, v, sinks=torch.zeros(4, device="meta"))


@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 2), (20, 5), (3, 1), (2, 2)])
def test_c07_head_groups(device, heads, heads_kv):
    q = torch.zeros(1, 16, heads, 64, dtype=HALF, device=device)
    v = torch.arange(1, heads_kv + 1, device=device).to(HALF)[None, None, :, None].expand(1, 16, heads_kv, 64)
    o = attend(q, torch.zeros_like(v), v)
    for head in range(heads):
        assert (o[:, :, head] == head // (heads // heads_kv) + 1).all()
    check(*ramps((2, 70, heads, 64), (2, 100, heads_kv, 64), device), causal=True)


@pytest.mark.parametrize(("heads", "heads_kv"), [(5, 2), (7, 3), (17, 8), (2, 4), (4, 0), (0, 2)])
def test_c07_head_counts_that_do_not_divide(device, heads, heads_kv):
    q = torch.zeros(1, 16, heads, 64, dtype=HALF, device=device)
    k = torch.zeros(1, 16, heads_kv, 64, dtype=HALF, device=device)
    with pytest.raises(ValueError, match=rf"\b{heads} heads.*\b{heads_kv}\b"):
        attend(q, k, k, out=torch.full_like(q, math.nan))


def test_c08_lse(device):
    ones = torch.ones(1, 1, 1, 64, dtype=HALF, device=device)
    _, lse = attend(ones, ones.expand(1, 7, 1, 64), ones.expand(1, 7, 1, 64), return_lse=True)
    assert lse.shape == (1, 1, 1)
    assert lse.item() == pytest.approx(8 + math.log(7), abs=1e-5)


def test_c08_parts_merge(device):
    q, k, v = ramps((1, 40, 2, 64), (1, 300, 2, 64), device)
    whole, whole_lse = attend(q, k, v, return_lse=True)
    parts = [attend(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 128), slice(128, 300), slice(0))]
    lses = torch.stack([lse for _, lse in parts])
    merged_lse = lses.logsumexp(0)
    weights = (lses - merged_lse).exp().transpose(2, 3)  # (parts, batch, queries, heads)
    merged = sum(o.float() * w[..., None] for (o, _), w in zip(parts, weights, strict=True))
    torch.testing.assert_close(merged_lse, whole_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(merged, whole.float(), atol=4e-3, rtol=4e-3)


def test_c09_no_visible_key(device):
    o, lse = attend(*counted(7, 3, device), causal=True, return_lse=True)
    assert column(o) == [0, 0, 0, 0, 1, 1.5, 2]
    assert lse[0, 0].tolist() == pytest.approx([-math.inf] * 4 + [0, math.log(2), math.log(3)], abs=1e-5)
    q, k, v = counted(5, 0, device)
    o, lse = attend(q, k, v, return_lse=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


def test_c09_no_visible_key_but_a_sink(device):
    sinks = torch.tensor([1.5], device=device)
    for q, k, v in (counted(7, 3, device), counted(4, 0, device)):
        o, lse = attend(q, k, v, causal=True, sinks=sinks, return_lse=True)
        assert (o[:, :4] == 0).all()
        assert (lse[..., :4] == 1.5).all()


def test_c60_functions_of_scores_and_masks(device):
    q, k, v = ramps((2, 70, 4, 64), (2, 90, 2, 64), device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    mods = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx) - b,
        "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx + 20 >= kv_idx) & ((kv_idx + h) % 3 != 0),
    }
    check(q, k, v, window=(50, 10), softcap=3.0, **mods)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (70, 90)]
    o = attend(q[:1], k[:1], v[:1], **mods)
    packed = flash_attention.attention_varlen(q[0], k[0], v[0], *ends, 70, 90, **mods)
    torch.testing.assert_close(packed, o[0])


def test_c64_functions_in_programs_that_are_compiled(device):
    torch._dynamo.reset()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, requires_grad=True)

    def call(q, k, v, left):
        return flash_attention.attention(
            q,
            k,
            v,
            score_mod=lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx),
            mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= left,
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for seq_len, left in ((70, 9), (90, 20), (33, 40)):
        given = ramps((2, seq_len, 4, 64), (2, seq_len, 2, 64), device)
        expected = call(*given, left)
        found = compiled(*given, left)
        assert torch.equal(found, expected)
        same = [torch.autograd.grad(out.float().square().sum(), slopes)[0] for out in (found, expected)]
        assert torch.equal(*same)
    assert counter.frame_count == 2  # the second holds lengths and the number open
    torch._dynamo.reset()


def test_c61_functions_are_called_once(device):
    q, k, v = ramps((1, 8, 1, 64), (1, 8, 1, 64), device)
    table, calls = torch.full((4,), 2.0, device=device), []

    def outside(score, b, h, q_idx, kv_idx):
        calls.append(q_idx)
        return score + table[kv_idx - 4]  # -4 to -1 count from the end

    o = attend(q, k, v, score_mod=outside)
    assert len(calls) == 1
    expected, _ = reference(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + 2.0)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)
    far = attend(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx * 2**40 + 4])
    torch.testing.assert_close(far, attend(q, k, v))

    def branch(score, b, h, q_idx, kv_idx):
        if q_idx > 3:
            return score
        return -score

    with pytest.raises(ModError, match=r"test_contract.*if q_idx > 3"):
        attend(q, k, v, score_mod=branch)


@pytest.mark.parametrize("lengths", LENGTHS_OF_INFINITIES)
@pytest.mark.parametrize("hidden", [slice(-300, None), slice(None, 300), slice(None), slice(1, None)])
def test_c09_scores_of_minus_infinity(device, hidden, lengths):
    q, k, v = infinities(lengths, device)
    k[:, hidden, 0, 0] = -math.inf
    for options in ({}, {"causal": True}, {"window": (150, 20)}):
        o, lse = check_infinities(q, k, v, **options)
        assert not o.isnan().any()
        if not options and hidden == slice(None):
            assert (o[:, :, 0] == 0).all()
            assert (lse[:, 0] == -math.inf).all()


@pytest.mark.parametrize("lengths", LENGTHS_OF_INFINITIES)
@pytest.mark.parametrize("key", [0, 20, -1])
def test_c10_scores_of_infinity(device, key, lengths):
    q, k, v = infinities(lengths, device)
    k[:, key, 0, 0] = math.inf
    for options in ({}, {"causal": True}):
        o, lse = check_infinities(q, k, v, **options)
        assert o[:, -1, 0].isnan().all()
        assert lse[:, 0, -1].isnan().all()
        assert o[:, :, 1].isfinite().all()


@pytest.mark.parametrize("seq_q", [1, 129])
@pytest.mark.parametrize(
    ("k", "out", "lse"),
    [([-32.0] * 4, 2.5, -8190.6137), ([-32.0] * 3 + [-31.75], 4.0, -8128.0), ([-32.0], 1.0, -8192.0)],
)
def test_c10_very_negative_scores(device, seq_q, k, out, lse):
    q = torch.full((1, seq_q, 1, 64), 32.0, dtype=HALF, device=device)
    o, o_lse = attend(q, keys(k, device), keys([j + 1.0 for j in range(len(k))], device), return_lse=True)
    torch.testing.assert_close(o, torch.full_like(o, out), atol=4e-3, rtol=0)
    torch.testing.assert_close(o_lse, torch.full_like(o_lse, lse), atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("exponent", [10, 20, 26])
def test_c10_large_scores(device, exponent):
    # 64 * 2^n * 2^m / 8 = 2^(n + m + 3): scores of 2^exponent and of half that, of both signs.
    q = torch.full((1, 130, 1, 64), 2.0 ** (exponent // 2), dtype=BFLOAT, device=device)
    unit = 2.0 ** (exponent - 3 - exponent // 2)
    k = keys([-unit, unit / 2, -unit / 2, unit, 0.0] + [0.0] * 300, device).to(BFLOAT)
    v = keys([1.0, 2.0, 3.0, 4.0, 5.0] + [6.0] * 300, device).to(BFLOAT)
    o, lse = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(o, torch.full_like(o, 4.0), atol=0, rtol=2**-7)
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0**exponent), atol=0, rtol=2e-6)


@pytest.mark.parametrize("seq_q", [1, 129])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_c10_scores_beyond_the_exponent(device, dtype, seq_q):
    """Output and LSE are right or NaN; never 0 and -inf, which would say that there is no key."""
    largest = 65504.0 if dtype is HALF else 122880.0
    values = [largest / 2**i for i in range(18)] + [1.25 * 2**i for i in range(15)] + [2.0**40]
    for value in (x for x in values if x < 65505 or dtype is BFLOAT):
        for sign in (1, -1):
            q = torch.full((1, seq_q, 1, 64), value, dtype=dtype, device=device)
            k, v = (torch.full((1, 300, 1, 64), x, dtype=dtype, device=device) for x in (sign * value, 1.5))
            o, lse = attend(q, k, v, return_lse=True)
            score = q[0, 0, 0, 0].double() * k[0, 0, 0, 0].double() * 8
            expected = torch.full_like(lse, float(score) + math.log(300))
            assert lse.isnan().equal(o[..., 0].isnan().transpose(1, 2))
            right = ~lse.isnan()
            if abs(score) <= 2**26:
                assert right.all()
            torch.testing.assert_close(lse[right], expected[right], atol=1e-3, rtol=2e-6)
            right = ~o.isnan()
            torch.testing.assert_close(o[right], torch.full_like(o, 1.5)[right], atol=0, rtol=2**-7)


def test_c10_scores_beyond_the_exponent_beside_others(device):
    """Blocks are visited from the last to the first: a row's first scores are far below its largest one."""
    q = torch.full((1, 129, 1, 64), 2.0**20, dtype=BFLOAT, device=device)
    for shrink in range(24):
        k = keys([0.0] * 8 + [-(2.0**17) * 0.83**shrink] * 600, device).to(BFLOAT)
        v = keys([1.0] * 8 + [5.0] * 600, device).to(BFLOAT)
        o, lse = attend(q, k, v, return_lse=True)
        assert (o.isnan() | (o == 1)).all()
        assert (lse.isnan() | ((lse - math.log(8)).abs() < 1e-3)).all()


def test_c10_scores_beyond_the_exponent_with_sinks_and_softcaps(device):
    q = torch.full((1, 70, 1, 64), 122880.0, dtype=BFLOAT, device=device)
    v = torch.ones_like(q)
    for options in ({"sinks": torch.zeros(1, device=device)}, {"softcap": 2.0**90}):
        o, lse = attend(q, q, v, return_lse=True, **options)
        assert (o.isnan() | (o == 1)).all()
        assert (lse.isnan() | (lse > 2.0**36)).all()


def test_c10_the_lowest_finite_scores_are_no_hidden_ones(device):
    q = torch.full((1, 70, 1, 64), 2.0**61, dtype=BFLOAT, device=device)
    k = torch.full(
        (1, 70, 1, 64), -(2.0**60), dtype=BFLOAT, device=device
    )  # scores of -2^127 before the scale
    o, lse = attend(q, k, torch.ones_like(q), return_lse=True)
    assert (o.isnan() | (o == 1)).all()
    assert not (lse == -math.inf).any()


@pytest.mark.parametrize("exponent", [10, 16, 20])
def test_c10_large_equal_scores_of_many_keys(device, exponent):
    # One query: the keys are cut into parts, not all of one length, whose LSEs are near 2^exponent.
    q = torch.full((1, 1, 1, 64), 2.0 ** (exponent // 2), dtype=BFLOAT, device=device)
    k = keys([2.0 ** (exponent - 3 - exponent // 2)] * 8200, device).to(BFLOAT)
    v = keys([0.0] * 5200 + [1.0] * 3000, device).to(BFLOAT)
    o = attend(q, k, v)
    rounding = math.expm1(2 * 2.0 ** (exponent - 23))  # of the odds, by the LSEs of two parts
    torch.testing.assert_close(o, torch.full_like(o, 3000 / 8200), atol=2e-3 + rounding / 4, rtol=0)


@pytest.mark.parametrize("n", [1, 33, 65, 127, 129])
def test_c10_no_phantom_keys(device, n):
    q = torch.ones(1, 5, 1, 64, dtype=HALF, device=device)
    o, lse = attend(q, keys([-2.5] * n, device), keys([1.0] * n, device), return_lse=True)
    assert (o == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, -20 + math.log(n)), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- what is accepted
def test_c11_types(device):
    q, k, v = ramps((1, 20, 2, 64), (1, 20, 2, 64), device)
    check(q, k, v)
    check(q.bfloat16(), k.bfloat16(), v.bfloat16())
    for dtype in (torch.float32, torch.float64, torch.int16, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=re.escape(f"q {dtype}, k {dtype}, v {dtype}")):
            attend(q.to(dtype), k.to(dtype), v.to(dtype))
    with pytest.raises(TypeError, match=r"q torch\.float16, k torch\.bfloat16, v torch\.bfloat16"):
        attend(q, k.bfloat16(), v.bfloat16())
    with torch.autocast(device, BFLOAT):
        ones = attend(torch.ones_like(q.float()), k.float(), torch.ones_like(v.bfloat16()))
        assert ones.dtype is BFLOAT
        assert (ones == 1).all()
        assert attend(q, k, v).dtype is HALF
        with pytest.raises(TypeError, match=r"q torch\.float64"):
            attend(q.double(), k, v)
    with pytest.raises(TypeError, match="k is a list"):
        attend(q, [1.0], v)
    with pytest.raises(TypeError, match="sparse"):
        attend(q.to_sparse(), k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (0, 16, 16, 2, 2, 64), (2, 0, 16, 2, 2, 64), (2, 16, 0, 2, 2, 64), (2, 16, 16, 0, 0, 64),
        (2, 0, 0, 2, 2, 64), (1, 1, 0, 8, 2, 128), (2, 0, 4096, 2, 2, 64),
    ],
)  # fmt: skip
def test_c12_empty(device, sizes, causal):
    batch, seq_q, seq_k, heads, heads_kv, d = sizes
    q, k, v = ramps((batch, seq_q, heads, d), (batch, seq_k, heads_kv, d), device)
    o, lse = attend(q, k, v, causal=causal, return_lse=True)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    assert lse.shape == (batch, heads, seq_q)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("seq_q", [1, 2, 17, 63, 65, 200])
@pytest.mark.parametrize("seq_k", [1, 3, 64, 127, 513])
def test_c12_lengths(device, seq_q, seq_k):
    for causal in (False, True):
        check(*ramps((2, seq_q, 2, 64), (2, seq_k, 2, 64), device), causal=causal)


@pytest.mark.parametrize("d", [8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 192, 256])
def test_c13_head_sizes(device, d):
    around = torch.full((2, 30, 2, d + 24), math.nan, dtype=HALF, device=device)
    inner = around[..., 8 : 8 + d]
    inner.copy_(ramp(tuple(inner.shape), 7, device=device))
    check(ramp((2, 20, 2, d), 5, device=device), inner, ramp((2, 30, 2, d), 11, device=device))


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (64, 128), (128, 64), (16, 256), (256, 8)])
def test_c13_head_size_of_v(device, d, d_v):
    q, k, v = generate_qkv(
        QKVConfig(2, 50, 4, d, DType.FP16, device, seq_len_k=70, n_heads_kv=2, d_head_v=d_v)
    )
    check(q, k, v, causal=True)


def test_c13_upper_half_counts(device):
    q = torch.zeros(1, 1, 1, 128, dtype=HALF, device=device)
    k = torch.zeros(1, 4, 1, 128, dtype=HALF, device=device)
    q[..., 64:] = 1
    k[..., 64:] = keys([j / 4 for j in range(4)], device)
    o, lse = attend(q, k, keys([0.0, 1.0, 2.0, 3.0], device, 128), return_lse=True)
    assert o[0, 0, 0, 0].item() == pytest.approx(2.692815, abs=2e-3)
    assert lse.item() == pytest.approx(4.517687, abs=1e-3)


@pytest.mark.parametrize("d", [0, 1, 4, 20, 63, 65, 100, 264])
def test_c13_bad_head_sizes(device, d):
    q, good = (
        torch.zeros(1, 4, 1, d, dtype=HALF, device=device),
        torch.zeros(1, 4, 1, 64, dtype=HALF, device=device),
    )
    with pytest.raises(ValueError, match=rf"{d}; supported are the multiples of 8 from 8 to 256"):
        attend(q, q, good)
    with pytest.raises(ValueError, match=rf"v is {d}; supported are the multiples of 8 from 8 to 256"):
        attend(good, good, q)


def test_c13_what_to_do_about_a_head_size(device):
    q, k, v = ramps((1, 5, 2, 64), (1, 7, 2, 64), device)
    with pytest.raises(ValueError, match="pad q and k with zeros to 16, and pass softmax_scale=12"):
        attend(q[..., :12], k[..., :12], v)
    pad = torch.nn.functional.pad
    o = attend(pad(q[..., :12], (0, 4)), pad(k[..., :12], (0, 4)), v, softmax_scale=12**-0.5)
    expected, _ = reference(q[..., :12], k[..., :12], v)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)
    # The scale is none of v's business.
    with pytest.raises(ValueError, match="pad v with zeros to 16, and take the result's first 12 columns"):
        attend(q, k, v[..., :12])
    o = attend(q, k, pad(v[..., :12], (0, 4)))
    expected, _ = reference(q, k, v[..., :12])
    torch.testing.assert_close(o[..., :12].double(), expected, atol=2e-3, rtol=2e-3)
    with pytest.raises(ValueError, match=r"v is 264; .*scaled_dot_product_attention"):
        attend(q, k, pad(v, (0, 200)))


def same_in_any_layout(q, k, v, **options):
    """Equal bits by the same kernel. Contiguous tensors may be given another one, as broadcast ones cannot go
    to the Hopper family: then the kernel is named."""
    o = check(q, k, v, **options)
    kernel = flash_attention.last_kernel()
    contiguous = [x.contiguous() for x in (q, k, v)]
    again, _ = attend(*contiguous, return_lse=True, **options)
    if flash_attention.last_kernel() != kernel:
        again, _ = attend(*contiguous, return_lse=True, config=kernel.config, **options)
        assert flash_attention.last_kernel() == kernel
    assert torch.equal(o, again)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_c14_layouts(device, dtype):
    shape = (2, 64, 2, 64)
    q, k, v = ramps(shape, shape, device, dtype)
    every_second = {a: ramp((2, 128, 2, 64), a, dtype, device)[:, ::2] for a in (7, 11)}
    same_in_any_layout(q, every_second[7], v)
    same_in_any_layout(q, k, every_second[11])
    for which in range(3):
        mixed = [q, k, v]
        mixed[which] = mixed[which].transpose(1, 2).contiguous().transpose(1, 2)
        same_in_any_layout(*mixed)
        mixed[which] = mixed[which].transpose(2, 3).contiguous().transpose(2, 3)
        same_in_any_layout(*mixed)
    same_in_any_layout(*torch.stack((q, k, v), dim=2).unbind(2), causal=True)
    same_in_any_layout(q, k[:1].expand(shape), v[:, :, :1].expand(shape))
    same_in_any_layout(q, k[:, :1].expand(shape), v[:, :1].expand(shape))


def test_c14_strides_of_single_entries(device):
    x = ramp((64 * 64,), 5, device=device)
    q = x.as_strided((1, 64, 1, 64), (12345, 64, 3, 1))
    same_in_any_layout(q, q, q)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_c14_storage_offsets(device, offset):
    shape = (2, 96, 3, 64)
    n = math.prod(shape)
    q, k, v = (
        torch.zeros(n + 16, dtype=HALF, device=device)[offset : offset + n].view(shape) for _ in range(3)
    )
    for x, a in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(ramp(shape, a, device=device))
    same_in_any_layout(q, k, v)
    wide = torch.zeros(2, 96, 3, 68, dtype=HALF, device=device)[..., :64].copy_(k)
    same_in_any_layout(q, wide, v)


def test_c14_lazy_negation_is_refused(device):
    """Such as parts of ``x.conj()``: their memory holds the negative of their values."""

    def calls(tensors):
        q, k, v, out, sinks = tensors
        ends = torch.tensor([0, 128], dtype=torch.int32, device=device)
        used = torch.tensor([64, 64], dtype=torch.int32, device=device)
        yield "attention", lambda: flash_attention.attention(q, k, v, sinks=sinks, out=out)
        rows = [x.flatten(0, 1) for x in (q, k, v, out)]
        yield (
            "varlen",
            lambda: flash_attention.attention_varlen(
                *rows[:3], ends, ends, 128, 128, sinks=sinks, out=rows[3]
            ),
        )
        yield "cached", lambda: attention_cached(q, k, v, used, sinks=sinks, out=out)
        yield "forward", lambda: flash_attention.forward(CONFIG, q, k, v, out)

    shape = (2, 64, 2, 64)
    tensors = [*ramps(shape, shape, device), torch.empty(shape, dtype=HALF, device=device)]
    tensors.append(torch.zeros(2, device=device))
    for _, call in calls(tensors):
        call()  # from now on it is remembered
    for i, x in enumerate(tensors):
        negated = [*tensors]
        negated[i] = torch._neg_view(x)
        for name, call in calls(negated):
            if name != "forward" or i < 4:
                with pytest.raises(ValueError, match=r"is negated lazily \(is_neg\)"):
                    call()


def test_c15_64_bit_offsets(device):
    base = torch.empty(2**31 + 16384, dtype=HALF, device=device)
    shape = (2, 64, 1, 64)
    q, k, v = (base[o:].as_strided(shape, (2**31, 64, 64, 1)) for o in (0, 4096, 8192))
    for x, a in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(ramp(shape, a, device=device))
    same_in_any_layout(q, k, v)


@pytest.mark.parametrize("shape", [(65537, 4, 1, 64), (1, 4, 65537, 64), (13108, 4, 5, 64)])
def test_c15_more_than_65535(device, shape):
    one = (1, shape[1], 1, 64)
    q, k, v = (ramp(one, a, device=device).expand(shape) for a in (5, 7, 11))
    o = attend(q, k, v, out=torch.full(shape, math.nan, dtype=HALF, device=device))
    assert (o == o[:1, :, :1]).all()
    expected, _ = reference(*(x[:1, :, :1] for x in (q, k, v)))
    torch.testing.assert_close(o[-1:, :, -1:].double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "seq_q", [pytest.param(1 << 18, id="cpu-size"), pytest.param(8388609, marks=pytest.mark.gpu)]
)
def test_c15_many_query_blocks(device, seq_q):
    if device == "cpu" and seq_q > 1 << 20:
        pytest.skip("takes a GPU")
    v = ramp((1, 1, 1, 64), 11, device=device)
    q = torch.zeros(1, 1, 1, 64, dtype=HALF, device=device).expand(1, seq_q, 1, 64)
    o = attend(q, v, v, out=torch.full((1, seq_q, 1, 64), math.nan, dtype=HALF, device=device))
    assert (o == v).all()


def test_c16_devices(device):
    q, k, v = ramps((1, 20, 2, 64), (1, 20, 2, 64), device)
    for which in range(3):
        mixed = [q, k, v]
        mixed[which] = mixed[which].to("meta")
        with pytest.raises(ValueError, match="meta"):
            attend(*mixed)
    assert attend(*(x.to("meta") for x in (q, k, v))).is_meta


# ---------------------------------------------------------------------- what is returned
def test_c18_new_output(device):
    q, k, v = ramps((2, 20, 2, 64), (2, 30, 2, 64), device, BFLOAT)
    o = attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert o.is_contiguous()
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)


def test_c19_out(device):
    q, k, v = ramps((2, 20, 2, 64), (2, 30, 2, 64), device)
    expected = attend(q, k, v)
    around = torch.full((2, 2, 40, 96), 7.0, dtype=HALF, device=device)
    out = around[:, :, 8:28, 16:80].transpose(1, 2)
    assert attend(q, k, v, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert (around == 7).all()
    packed = torch.zeros(2, 20, 3, 2, 64, dtype=HALF, device=device)  # q, v and out lie between each other
    packed[:, :, 0], packed[:, :, 1] = q, v[:, :20]
    attend(packed[:, :, 0], k[:, :20], packed[:, :, 1], out=packed[:, :, 2])
    assert torch.equal(packed[:, :, 2], attend(q, k[:, :20], v[:, :20]))
    assert torch.equal(packed[:, :, 1], v[:, :20])


def test_c19_bad_out(device):
    q, k, v = ramps((2, 20, 2, 64), (2, 20, 2, 64), device)
    new = torch.empty_like(q)
    for out, error, text in (
        (torch.empty_like(q[:, :10]), ValueError, "out has shape"),
        (new.float(), TypeError, r"out is torch\.float32"),
        (new.to("meta"), ValueError, "out is on meta"),
        (new.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "last stride .* pass out=None"),
        (new[:1].expand(q.shape), ValueError, "share memory"),
        (q, ValueError, "out overlaps q"),
        (k, ValueError, "out overlaps k"),
        (v, ValueError, "out overlaps v"),
        (new.clone().requires_grad_(), NotImplementedError, "out requires grad"),
        ("o", TypeError, "out is a str"),
    ):
        with pytest.raises(error, match=text):
            attend(q, k, v, out=out)


def test_c20_nan_is_shown(device):
    q, k, v = ramps((1, 70, 2, 64), (1, 90, 2, 64), device)
    k[0, 5, 0, 3] = math.nan
    v[0, 8, 1, 7] = math.nan
    q[0, 11, 1, 0] = math.nan
    o = attend(q, k, v)
    assert o[:, :, 0].isnan().all()
    assert o[:, :, 1, 7].isnan().all()
    assert o[:, 11, 1].isnan().all()
    assert o[:, :, 1].isnan().sum() == 70 + 63


@pytest.mark.parametrize("growth", [1.0, 50.0, 1000.0])
@pytest.mark.parametrize("key", [0, 3, 600, 639])
def test_c20_nan_outlives_larger_scores(device, key, growth):
    q, k, v = ramps((1, 70, 1, 64), (1, 640, 1, 64), device)
    k[:, :300] *= growth  # blocks are visited from the last to the first
    k[:, key, 0, 3] = math.nan
    o, lse = attend(q, k, v, softmax_scale=1.0, return_lse=True)
    assert o.isnan().all()
    assert lse.isnan().all()


def test_c20_a_nan_value_is_shown_whatever_its_weight(device):
    for lengths in LENGTHS_OF_INFINITIES:
        q, k, v = infinities(lengths, device)
        k[:, 0, 0, 0] = 600.0  # all weight, but for e^-600
        v[:, -1, 0, 5] = math.nan
        o, lse = attend(q, k, v, softmax_scale=1.0, return_lse=True)
        assert o[:, :, 0, 5].isnan().all()
        assert o.isnan().sum() == lengths[0]
        assert lse.isfinite().all()


@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 700), (5, 700), (130, 700), (300, 400), (64, 200)])
@pytest.mark.parametrize("window", [(0, 0), (20, 0), (37, 5), (130, 3), (64, None)])
def test_c30_keys_that_no_query_sees_may_hold_anything(device, window, seq_q, seq_k):
    q, k, v = ramps((2, seq_q, 4, 64), (2, seq_k, 2, 64), device)
    expected = [attend(q, k, v, window=window, causal=causal, return_lse=True) for causal in (False, True)]
    hidden = max(0, seq_k - seq_q - window[0])
    for rubbish in (math.nan, math.inf):
        k[:, :hidden], v[:, :hidden] = rubbish, rubbish
        for causal in (False, True):
            found = attend(q, k, v, window=window, causal=causal, return_lse=True)
            for mine, right in zip(found, expected[causal], strict=True):
                assert mine.equal(right)
            assert attend(q, k, v, window=window, causal=causal).isfinite().all()


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 9)}, {"window": (100, 0)}])
def test_c30_a_hidden_key_may_hold_anything(device, options):
    """Of k alone, where other queries see the key."""
    q, k, v = ramps((1, 200, 2, 64), (1, 200, 2, 64), device)
    finite = attend(q, k, v, **options, return_lse=True)
    k[:, 120] = math.nan
    out, lse = attend(q, k, v, **options, return_lse=True)
    left, right = options.get("window", (200, 0))
    sees = torch.zeros(200, dtype=torch.bool, device=device)
    sees[max(0, 120 - right) : 120 + left + 1] = True
    assert out[:, sees].isnan().all()
    torch.testing.assert_close(out[:, ~sees], finite[0][:, ~sees], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse[..., ~sees], finite[1][..., ~sees], atol=1e-3, rtol=2e-6)


def test_c30_a_key_that_a_function_hides_may_hold_anything(device):
    """Of k alone, from some queries as from all of them; v, and both with gradients, are read."""
    q, k, v = ramps((1, 200, 2, 64), (1, 200, 2, 64), device)
    mods = {
        "all": lambda b, h, q_idx, kv_idx: (kv_idx % 50 != 20) & (q_idx * 0 < 1),
        "some": lambda b, h, q_idx, kv_idx: (kv_idx % 50 != 20) | (q_idx >= 100),
    }
    for hidden_from, mask_mod in mods.items():
        finite = attend(q, k, v, mask_mod=mask_mod, return_lse=True)
        for rubbish in (math.nan, math.inf):
            full = k.clone()
            full[:, 20::50] = rubbish
            out, lse = attend(q, full, v, mask_mod=mask_mod, return_lse=True)
            others = slice(0, 200 if hidden_from == "all" else 100)
            assert out[:, others].equal(finite[0][:, others])
            assert lse[..., others].equal(finite[1][..., others])


@pytest.mark.parametrize("seq_k", [1, 11, 63, 65, 129, 509])
@pytest.mark.parametrize("seq_q", [1, 11, 997])
def test_c21_guarded(device, seq_q, seq_k):
    def guarded(rows, a):
        x = torch.full((2, rows + 256, 2, 64), math.nan, dtype=HALF, device=device)[:, 128 : 128 + rows]
        return x.copy_(ramp((2, rows, 2, 64), a, device=device))

    q, k, v = guarded(seq_q, 5), guarded(seq_k, 7), guarded(seq_k, 11)
    around = torch.full((2, seq_q + 256, 2, 64), 77.0, dtype=HALF, device=device)
    out = around[:, 128 : 128 + seq_q]
    for causal in (False, True):
        attend(q, k, v, causal=causal, out=out)
        expected, _ = reference(q, k, v, causal=causal)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    out.fill_(77.0)
    assert (around == 77).all()


def test_c22_equal_bits(device):
    q, k, v = generate_qkv(QKVConfig(3, 200, 4, 64, DType.FP16, device, n_heads_kv=2))
    for causal in (False, True):
        o = attend(q, k, v, causal=causal)
        assert torch.equal(o, attend(q, k, v, causal=causal))
        others = [torch.cat((x[:1], torch.full_like(x[1:], 7.0))) for x in (q, k, v)]
        assert torch.equal(o[0], attend(*others, causal=causal)[0])
        o = attend(q, k, v, causal=causal, config=CONFIG)
        for b in range(3):
            alone = attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=causal, config=CONFIG)
            assert torch.equal(o[b], alone[0])


def test_c23_nothing_is_kept(device):
    q, k, v = ramps((1, 20, 2, 64), (1, 20, 2, 64), device)
    out = torch.empty_like(q)
    attend(q, k, v, out=out)
    alive = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    assert not any(x() is not None for x in alive)


@pytest.mark.gpu
def test_c23_memory():
    def call(i):
        q, k, v = ramps((1, 16, 2, 64), (1, 1 + i % 500, 2, 64), "cuda")
        attend(q, k, v, softmax_scale=0.1 + 1e-4 * i)

    for i in range(50):
        call(i)
    before = torch.cuda.memory_allocated()
    for i in range(1000):
        call(i)
    assert torch.cuda.memory_allocated() == before


# ---------------------------------------------------------------------- packed sequences
LENGTHS_Q, LENGTHS_K = (5, 0, 64, 1, 33), (9, 7, 40, 0, 300)


def packed(device, heads=4, heads_kv=2, d=64, d_v=64, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K):
    """q, k, v, their offsets, and the same as one (1, seq, heads, d) triple a sequence."""
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q = ramp((total_q, heads, d), 5, device=device)
    k, v = ramp((total_k, heads_kv, d), 7, device=device), ramp((total_k, heads_kv, d_v), 11, device=device)
    offsets = [
        torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        for lengths in (lengths_q, lengths_k)
    ]
    alone = [
        tuple(x[None] for x in parts)
        for parts in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    return (q, k, v, *offsets, max(lengths_q), max(lengths_k)), alone


def attend_packed(*arguments, **options):
    try:
        return flash_attention.attention_varlen(*arguments, **options)
    except NoKernelError as error:
        assert arguments[0].is_cuda
        pytest.skip(f"no CUDA kernel yet: {error}")


@pytest.mark.parametrize("lengths_k", [(21, 14, 70), (1, 1, 1)])
@pytest.mark.parametrize(("d", "causal"), [(16, True), (64, False), (128, True)])
def test_c24_packed_decoding(device, lengths_k, d, causal):
    """One query of each sequence: the longest has one row, and the tensor has more."""
    arguments, alone = packed(device, d=d, d_v=d, lengths_q=(1, 1, 1), lengths_k=lengths_k)
    o, lse = attend_packed(*arguments, causal=causal, return_lse=True)
    expected = [reference(*one, causal=causal) for one in alone]
    torch.testing.assert_close(o.double(), torch.cat([e[0] for e, _ in expected]), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), torch.cat([x[0] for _, x in expected], 1), atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (4, 3)}, {"softcap": 3.0}, {"softmax_scale": 0.0}]
)
def test_c24_packed(device, options):
    arguments, alone = packed(device)
    out = torch.full_like(arguments[0], math.nan)
    o, lse = attend_packed(*arguments, **options, return_lse=True, out=out, validate=True)
    assert o is out
    assert lse.shape == (4, sum(LENGTHS_Q))
    expected = [reference(*one, **options) for one in alone]
    torch.testing.assert_close(o.double(), torch.cat([e[0] for e, _ in expected]), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), torch.cat([x[0] for _, x in expected], 1), atol=1e-3, rtol=2e-6)


def test_c24_packed_with_sinks_and_other_head_sizes(device):
    arguments, alone = packed(device, d=72, d_v=24)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    o = attend_packed(*arguments, sinks=sinks, causal=True)
    expected = torch.cat([reference(*one, sinks=sinks, causal=True)[0][0] for one in alone])
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)


def test_c24_no_sequences(device):
    (q, k, v, *_), _ = packed(device)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    o, lse = attend_packed(q[:0], k[:0], v[:0], nothing, nothing, 0, 0, return_lse=True)
    assert o.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


def with_argument(arguments, index, value):
    return (*arguments[:index], value, *arguments[index + 1 :])


def test_c25_offsets(device):
    arguments, _ = packed(device)
    offsets = arguments[3]
    for index, value, error, text in (
        (3, offsets.long(), TypeError, r"cu_seqlens_q is torch\.int64"),
        (3, offsets[None], ValueError, r"cu_seqlens_q has shape \(1, 6\)"),
        (3, offsets[:-1].contiguous(), ValueError, "cu_seqlens_q has 5 entries, cu_seqlens_k 6"),
        (4, offsets.to("meta"), ValueError, "cu_seqlens_k is on meta"),
        (4, [0, 3], TypeError, "cu_seqlens_k is a list"),
        (5, 64.0, TypeError, "max_seqlen_q"),
        (6, -1, ValueError, "max_seqlen_k"),
        (0, arguments[0][None], ValueError, r"\(total, heads, d\)"),
    ):
        with pytest.raises(error, match=text):
            attend_packed(*with_argument(arguments, index, value))
    with pytest.raises(TypeError, match="validate is 'no'; it must be True or False"):
        attend_packed(*arguments, validate="no")


def test_c25_offset_values(device):
    arguments, _ = packed(device)
    for index, values, text in (
        (3, [1, 5, 5, 69, 70, 103], "cu_seqlens_q starts with 1"),
        (3, [0, 5, 4, 69, 70, 103], "cu_seqlens_q decreases by 1"),
        (4, [0, 9, 16, 56, 56, 357], "cu_seqlens_k ends with 357; .* 356"),
        (4, [0, 9, 16, 16, 16, 356], "340 rows; max_seqlen_k is 300"),
    ):
        wrong = torch.tensor(values, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=text):
            attend_packed(*with_argument(arguments, index, wrong), validate=True)
    far = torch.tensor([0, 2**31 - 1, -2, 69, 70, 103], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"cu_seqlens_q decreases by {2**31 + 1}"):
        attend_packed(*with_argument(with_argument(arguments, 3, far), 5, 2**31 - 1), validate=True)


@pytest.mark.parametrize("longest", [0, 1, 64, 299])
def test_c25_offsets_say_which_keys_there_are(device, longest):
    arguments, alone = packed(device)
    shorter = with_argument(arguments, 6, longest)
    with pytest.raises(ValueError, match=f"300 rows; max_seqlen_k is {longest}"):
        attend_packed(*shorter, validate=True)
    if device == "cpu":
        return
    for options in ({}, {"causal": True}):
        o, lse = attend_packed(*shorter, return_lse=True, **options)
        expected = [reference(*one, **options) for one in alone]
        torch.testing.assert_close(o.double(), torch.cat([e[0] for e, _ in expected]), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(
            lse.double(), torch.cat([x[0] for _, x in expected], 1), atol=1e-3, rtol=2e-6
        )


@pytest.mark.parametrize("longest", [1, 5, 40])
def test_c25_more_queries_than_were_announced(device, longest):
    arguments, alone = packed(device)
    shorter = with_argument(arguments, 5, longest)
    with pytest.raises(ValueError, match=f"64 rows; max_seqlen_q is {longest}"):
        attend_packed(*shorter, validate=True)
    if device == "cpu":
        return
    total = sum(LENGTHS_Q)
    around = torch.full((total + 128, 4, 64), 77.0, dtype=HALF, device=device)
    out = around[64:-64]
    attend_packed(*shorter, causal=True, out=out)
    first = 0
    for n, one in zip(LENGTHS_Q, alone, strict=True):
        if n <= longest:
            expected, _ = reference(*one, causal=True)
            torch.testing.assert_close(out[first : first + n].double(), expected[0], atol=2e-3, rtol=2e-3)
        first += n
    out.fill_(77.0)
    assert (around == 77).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 3)}, {"sinks": True}])
@pytest.mark.parametrize("ends", [[0, 30, 80], [0, 1, 2, 3], [0, 0, 0], [0]], ids=str)
def test_c31_rows_behind_the_last_sequence(device, ends, options):
    """Padding at the end of packed tensors, of queries and of keys."""
    q, k, v = ramps((100, 4, 64), (120, 2, 64), device)
    longest = max((b - a for a, b in pairwise(ends)), default=0)
    if options == {"sinks": True}:
        options = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)}
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    around = torch.full((300, 4, 64), math.nan, dtype=HALF, device=device)
    out = around[100:200]
    for validate in (False, True):
        around.fill_(math.nan)
        arguments = (q, k, v, offsets, offsets, longest, longest)
        _, lse = attend_packed(*arguments, **options, return_lse=True, out=out, validate=validate)
        for begin, end in pairwise(ends):
            one = slice(begin, end)
            expected, expected_lse = reference(q[None, one], k[None, one], v[None, one], **options)
            torch.testing.assert_close(out[one].double(), expected[0], atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(lse[:, one].double(), expected_lse[0], atol=1e-3, rtol=2e-6)
        assert (out[ends[-1] :] == 0).all()
        assert (lse[:, ends[-1] :] == -math.inf).all()
        assert around[:100].isnan().all()
        assert around[200:].isnan().all()


ODD_OFFSETS = (
    [0, -5, 256], [0, 256, -5], [-7, 100, 256], [0, 300, 256], [0, 2**31 - 1, 256], [-(2**31), 2**31 - 1, 5],
    [256, 128, 0], [0, 0, 2**31 - 1], [20, 100, 200],
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("ends", ODD_OFFSETS, ids=str)
def test_c31_offsets_that_nobody_reads_name_rows_of_the_tensors(which, ends):
    """Nothing beside the tensors is read (it would be NaN) or written, and nothing is read out of bounds."""
    good = [0, 128, 256]
    around = torch.full((3 * 256, 4, 64), math.nan, dtype=HALF, device="cuda")
    padded = torch.full((3, 3 * 256, 4, 64), math.nan, dtype=HALF, device="cuda")
    q, k, v = padded[:, 256:512]
    padded[:, 256:512] = ramp((3, 256, 4, 64), 5, device="cuda")
    out = around[256:512]
    offsets = [
        torch.tensor(ends if which in (name, "both") else good, dtype=torch.int32, device="cuda")
        for name in ("q", "k")
    ]
    for longest in (1, 128, 256):
        for options in ({}, {"causal": True}):
            attend_packed(q, k, v, *offsets, longest, 256, out=out, return_lse=True, **options)
            torch.cuda.synchronize()
            assert around[:256].isnan().all()
            assert around[512:].isnan().all()
    _, lse = attend_packed(q, k, v, *offsets, 256, 256, out=out, return_lse=True)
    assert out.isfinite().all()
    if which != "k" and ends == sorted(ends):
        for none in (slice(0, max(ends[0], 0)), slice(max(min(ends[-1], 256), 0), 256)):
            assert (out[none] == 0).all()
            assert (lse[:, none] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("seq_q", [1, 70])
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("count", [-1, -(2**31), 97, 2**31 - 1])
def test_c31_counts_that_nobody_reads(count, page_size, seq_q):
    capacity = 96 if page_size != 64 else 128
    around = torch.full((2, 3, capacity, 2, 64), math.nan, dtype=HALF, device="cuda")
    q, rows, _ = ramps((1, seq_q, 4, 64), (1, capacity, 2, 64), "cuda")
    around[:, 1] = rows[0]
    k, v = around[0, 1:2], around[1, 1:2]
    table = None
    if page_size:
        k, v = (x.reshape(-1, page_size, 2, 64) for x in (k, v))
        table = torch.arange(len(k), dtype=torch.int32, device="cuda")[None]
    seqused = torch.tensor([count], dtype=torch.int32, device="cuda")
    out, lse = attention_cached(q, k, v, seqused, block_table=table, return_lse=True)
    n = max(0, min(count, capacity))
    expected, expected_lse = reference(q, rows[:, :n], rows[:, :n])
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


# ---------------------------------------------------------------------- what runs
CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)


def test_c26_config_and_backend(device):
    q, k, v = ramps((1, 100, 2, 64), (1, 80, 2, 64), device)
    check_config_ran = attend(q, k, v, config=CONFIG, backend=device, causal=True)
    assert flash_attention.last_kernel().config == CONFIG
    expected, _ = reference(q, k, v, causal=True)
    torch.testing.assert_close(check_config_ran.double(), expected, atol=2e-3, rtol=2e-3)
    other = "cuda" if device == "cpu" else "cpu"
    for options, error, text in (
        ({"backend": other}, ValueError, f"backend is '{other}'"),
        ({"backend": "tpu"}, ValueError, "cuda, cpu"),
        ({"config": "(FP16, 64)"}, TypeError, "config is a str"),
        (
            {"config": FlashForwardKernelConfig(*(DType.BF16, *list(CONFIG.__dict__.values())[1:]))},
            TypeError,
            "BF16",
        ),
    ):
        with pytest.raises(error, match=text):
            attend(q, k, v, **options)
    wide = ramps((1, 100, 2, 128), (1, 80, 2, 128), device)
    with pytest.raises(InfeasibleConfigError, match="head size"):
        attend(*wide, config=CONFIG)


def test_c27_choices(device):
    q, k, v = ramps((2, 512, 8, 128), (2, 512, 8, 128), device)
    choice = flash_attention.explain_choice(q, k, v, causal=True)
    assert choice.reason
    attend(q, k, v, causal=True)
    assert flash_attention.last_kernel() == choice.kernel
    elsewhere = flash_attention.explain_choice(q, k, v, facts=device_facts("A100"))
    assert len(elsewhere.rejected) > 10
    assert all(r.reason for r in elsewhere.rejected)
    assert elsewhere.kernel.short_form() in str(elsewhere)


def test_c28_after_an_error(device):
    q, k, v = ramps((1, 20, 2, 64), (1, 20, 2, 64), device)
    expected = attend(q, k, v)
    for bad in ((q, k[:, :10], v), (q, k.float(), v), (q[..., :60], k[..., :60], v)):
        with pytest.raises((ValueError, TypeError)):
            attend(*bad)
        assert torch.equal(attend(q, k, v), expected)


# ---------------------------------------------------------------------- caches
@pytest.mark.parametrize("seq_q", [1, 5])
@pytest.mark.parametrize("page_size", [0, 16, 48])
def test_c29_a_cache_of_keys(device, page_size, seq_q):
    lengths, capacity = (96, 17, 0, 50), 96
    q, k, v = ramps((4, seq_q, 4, 64), (4, capacity, 2, 64), device)
    table, caches = None, (k, v)
    if page_size:
        n_pages = 4 * capacity // page_size
        table = torch.arange(n_pages - 1, -1, -1, dtype=torch.int32, device=device).view(4, -1)
        caches = tuple(x.reshape(n_pages, page_size, 2, 64).flip(0) for x in (k, v))
        for item, n in enumerate(lengths):
            table[item, -(-n // page_size) :] = -12345
    seqused = torch.tensor(lengths, dtype=torch.int32, device=device)
    for options in ({}, {"causal": True}):
        out, lse = attention_cached(q, *caches, seqused, block_table=table, return_lse=True, **options)
        for item, n in enumerate(lengths):
            one = slice(item, item + 1)
            expected, expected_lse = reference(q[one], k[one, :n], v[one, :n], **options)
            torch.testing.assert_close(out[one].double(), expected, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(lse[one].double(), expected_lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("seq_q", [1, 5, 70])
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("window", [(0, 0), (30, 0), (100, 7)])
def test_c30_evicted_pages_hold_anything(device, window, page_size, seq_q):
    """A page that no query's window reaches, and the rows of the first page before it."""
    lengths, capacity = (512, 300, 77), 512
    q, k, v = ramps((3, seq_q, 4, 64), (3, capacity, 2, 64), device)
    seqused = torch.tensor(lengths, dtype=torch.int32, device=device)
    expected = [
        reference(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], window=window)
        for i, n in enumerate(lengths)
    ]
    for i, n in enumerate(lengths):
        k[i, : max(0, n - seq_q - window[0])] = math.nan
        v[i, : max(0, n - seq_q - window[0])] = math.nan
        k[i, n:], v[i, n:] = math.nan, math.nan
    table = None
    if page_size:
        n_pages = 3 * capacity // page_size
        table = torch.arange(n_pages - 1, -1, -1, dtype=torch.int32, device=device).view(3, -1)
        k, v = (x.reshape(n_pages, page_size, 2, 64).flip(0) for x in (k, v))
    out, lse = attention_cached(q, k, v, seqused, block_table=table, window=window, return_lse=True)
    for i, (right, right_lse) in enumerate(expected):
        torch.testing.assert_close(out[i : i + 1].double(), right, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[i : i + 1].double(), right_lse, atol=1e-3, rtol=2e-6)


NO_PAGES = (3, -1, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("page", [2, *NO_PAGES])
def test_c29_pages_that_are_not_there_are_refused_where_they_are_read(device, page):
    q, k, v = ramps((2, 1, 2, 64), (3, 16, 2, 64), device)
    seqused = torch.tensor([17, 16], dtype=torch.int32, device=device)
    # The second item's second page is not used.
    table = torch.tensor([[0, page], [1, 99]], dtype=torch.int32, device=device)
    for options in ({"validate": True}, {}) if device == "cpu" else ({"validate": True},):
        if page in NO_PAGES:
            with pytest.raises(ValueError, match=rf"block_table\[0, 1\] is {page}.* the pages 0 to 2"):
                attention_cached(q, k, v, seqused, block_table=table, **options)
        else:
            assert attention_cached(q, k, v, seqused, block_table=table, **options).shape == q.shape
    with pytest.raises(TypeError, match="validate is 'no'; it must be True or False"):
        attention_cached(q, k, v, seqused, block_table=table, validate="no")


@pytest.mark.gpu
@pytest.mark.parametrize("seq_q", [1, 70])
@pytest.mark.parametrize("page_size", [16, 64, 1000])
@pytest.mark.parametrize("page", NO_PAGES)
def test_c29_pages_that_are_not_there_spoil_their_item_alone(page, page_size, seq_q):
    q, k, v = ramps((2, seq_q, 4, 64), (3, page_size, 2, 64), "cuda")
    seqused = torch.tensor([2 * page_size - 5, page_size], dtype=torch.int32, device="cuda")
    table = torch.tensor([[page, 2], [1, page]], dtype=torch.int32, device="cuda")
    out = attention_cached(q, k, v, seqused, block_table=table)
    expected, _ = reference(q[1:], k[1:2], v[1:2])
    torch.testing.assert_close(out[1:].double(), expected, atol=2e-3, rtol=2e-3)


def test_c29_no_pages_at_all(device):
    q, k, v = ramps((2, 3, 2, 64), (0, 16, 2, 64), device)
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    out, lse = attention_cached(q, k, v, nothing, block_table=table, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    with pytest.raises(ValueError, match="k and v have no page"):
        attention_cached(q, k, v, nothing + 1, block_table=table, validate=True)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("cuts", [[0, 100], [0, 37, 100], [0, 1, 64, 99, 100], [0, 50, 50, 100]], ids=str)
def test_c32_parts_of_the_keys_are_merged(device, cuts, options):
    q, k, v = ramps((2, 60, 4, 64), (2, 100, 2, 64), device)
    parts = [(k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]
    results = [attend(q, *part, return_lse=True, **options) for part in parts]
    out, lse = flash_attention.merge(*zip(*results, strict=True))
    assert out.dtype is HALF
    expected, expected_lse = reference(q, k, v, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)
    again, lse_again = flash_attention.merge(*zip(*results, strict=True))
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
