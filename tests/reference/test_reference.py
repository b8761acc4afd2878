"""The float64 reference against hand-computed values and against PyTorch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_helpers.kernel_configs import DType
from flash_helpers.test.utils import QKVConfig, generate_qkv, py_flash_attention, ramp, reference


def column(values: list[float], d: int = 64) -> torch.Tensor:
    """(1, keys, 1, d) with one value a key."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None, None].expand(1, -1, 1, d)


def counted(seq_q: int, seq_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = 0 and v[j] = j + 1: outputs are means over the visible keys."""
    q = torch.zeros(1, seq_q, 1, 64, dtype=torch.float64)
    return q, torch.zeros(1, seq_k, 1, 64, dtype=torch.float64), column([j + 1.0 for j in range(seq_k)])


def test_causal_sees_a_cache():
    out, lse = reference(*counted(3, 7), causal=True)
    assert out[0, :, 0, 0].tolist() == pytest.approx([3, 3.5, 4])
    assert lse[0, 0].tolist() == pytest.approx([math.log(5), math.log(6), math.log(7)])


def test_causal_rows_without_keys():
    out, lse = reference(*counted(7, 3), causal=True)
    assert out[0, :, 0, 0].tolist() == pytest.approx([0, 0, 0, 0, 1, 1.5, 2])
    assert lse[0, 0].tolist() == pytest.approx([-math.inf] * 4 + [0, math.log(2), math.log(3)])


def test_causal_long():
    q, k, _ = counted(129, 300)
    out, lse = reference(q, k, column([j % 16 + 1.0 for j in range(300)]), causal=True)
    assert out[0, 0, 0, 0].item() == pytest.approx(8.360465, abs=1e-6)
    assert lse[0, 0, 0].item() == pytest.approx(5.147494, abs=1e-6)
    assert out[0, -1, 0, 0].item() == pytest.approx(8.42)


def test_lse_is_natural():
    q = torch.ones(1, 1, 1, 64)
    _, lse = reference(q, q.expand(1, 7, 1, 64), q.expand(1, 7, 1, 64))
    assert lse.item() == pytest.approx(8 + math.log(7))


@pytest.mark.parametrize(("d", "expected"), [(40, 2.346685), (63, 2.487794), (72, 2.528733), (100, 2.625584)])
def test_scale_of_the_callers_head_size(d, expected):
    q = torch.ones(1, 1, 1, d)
    out, _ = reference(q, column([j / 8 for j in range(4)], d), column([float(j) for j in range(4)], d))
    assert out[0, 0, 0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_strided_ramps():
    q, v = ramp((2, 64, 2, 64), 5), ramp((2, 64, 2, 64), 11)
    k = ramp((2, 128, 2, 64), 7)[:, ::2]
    out, lse = reference(q, k, v)
    assert out[0, 0, 0, 0].item() == pytest.approx(0.048275, abs=1e-6)
    assert out[0, 63, 1, 63].item() == pytest.approx(-0.306000, abs=1e-6)
    assert lse[0, 0, 0].item() == pytest.approx(6.361428, abs=1e-6)
    assert lse[0, 1, 63].item() == pytest.approx(7.203187, abs=1e-6)


def test_window_and_sink():
    out, lse = reference(*counted(5, 5), window=(1, 2))
    means = [(1 + 2 + 3) / 3, (1 + 2 + 3 + 4) / 4, (2 + 3 + 4 + 5) / 4, (3 + 4 + 5) / 3, (4 + 5) / 2]
    assert out[0, :, 0, 0].tolist() == pytest.approx(means)
    sink = torch.tensor([math.log(2)])  # as heavy as two keys
    out, lse = reference(*counted(1, 2), sinks=sink)
    assert out[0, 0, 0, 0].item() == pytest.approx(3 / 4)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (6, 2), (4, 1)])
def test_like_pytorch(causal, heads, heads_kv):
    q, k, v = generate_qkv(QKVConfig(2, 33, heads, 40, DType.BF16, n_heads_kv=heads_kv))
    out, _ = reference(q, k, v, causal=causal)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // heads_kv, 1) for x in (k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_soft_cap():
    q, k, v = generate_qkv(QKVConfig(1, 9, 2, 8, DType.FP16, distribution="peaked"))
    out, lse = reference(q, k, v, softcap=3.0)
    scores = q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT * 8**-0.5
    scores = 3 * torch.tanh(scores / 3)
    torch.testing.assert_close(out, (torch.softmax(scores, -1) @ v.double().transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_eager_attention_is_close_and_bottom_right():
    q, k, v = generate_qkv(QKVConfig(2, 17, 4, 32, DType.FP16, seq_len_k=40, n_heads_kv=2))
    expected, _ = reference(q, k, v, causal=True)
    torch.testing.assert_close(
        py_flash_attention(q, k, v, upcast=True, causal=True), expected.float(), atol=1e-5, rtol=1e-5
    )
    same = py_flash_attention(q, k, v, causal=True)
    assert same.dtype is torch.float16
    torch.testing.assert_close(same.double(), expected, atol=4e-3, rtol=4e-3)
