"""The CPU backend against the float64 reference, for every configuration that is built ahead of time."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import cache

import pytest
import torch

from flash_attention import forward
from flash_attention.backends import cpu, full_precision
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    get_kernels_to_build,
)
from flash_helpers.test.utils import (
    QKVConfig,
    error_stats,
    generate_qkv,
    generate_qkvo,
    py_flash_attention,
    ramp,
    reference,
)

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
ALL = get_kernels_to_build()
LSE_TOLERANCE = {"atol": 1e-3, "rtol": 2e-6}


def ids(config: FlashForwardKernelConfig) -> str:
    return config.short_form()


@cache
def case(dtype: DType, d_head: int, distribution: str):
    """Inputs, reference and PyTorch's error, shared by all configurations."""
    inputs = QKVConfig(2, 256, 2, d_head, dtype, distribution=distribution)
    q, k, v = generate_qkv(inputs)
    expected, _ = reference(q, k, v)
    return inputs, expected, error_stats(py_flash_attention(q, k, v), expected)


def run(config, q, k, v, **features):
    """Output and LSE by the backend itself, which takes any lengths."""
    o = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    cpu.attention(config, q, k, v, o, lse, q.shape[-1] ** -0.5, **features)
    return o, lse


def check_config(config, distribution):
    inputs, expected, pytorch = case(config.dtype, config.d_head, distribution)
    q, k, v, o = generate_qkvo(inputs)
    error = error_stats(forward(config, q, k, v, o), expected)
    assert error.max_abs <= 2 * pytorch.max_abs
    assert error.rel_frobenius <= 2 * pytorch.rel_frobenius


@pytest.mark.parametrize("config", ALL, ids=ids)
def test_every_configuration(config):
    check_config(config, "randn")


@pytest.mark.parametrize("distribution", ["peaked", "ramp"])
@pytest.mark.parametrize("optimized_softmax", [False, True])
@pytest.mark.parametrize("B_c", [32, 128])
@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize("dtype", list(DType))
def test_distributions(dtype, d_head, B_c, optimized_softmax, distribution):
    config = dataclasses.replace(
        CONFIG, dtype=dtype, d_head=d_head, B_c=B_c, optimized_softmax=optimized_softmax
    )
    check_config(config, distribution)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_traits_and_lse(dtype, causal):
    q, k, v, o = generate_qkvo(QKVConfig(2, 96, 4, 64, dtype, seq_len_k=131, n_heads_kv=2))
    lse = torch.full((2, 4, 96), math.nan)
    kernel = ForwardKernel(dataclasses.replace(CONFIG, dtype=dtype), ForwardTraits(causal=causal))
    cpu.forward(kernel, q, k, v, o, lse, 0.3)
    expected, expected_lse = reference(q, k, v, causal=causal, softmax_scale=0.3)
    pytorch = error_stats(py_flash_attention(q, k, v, causal=causal, softmax_scale=0.3), expected)
    assert error_stats(o, expected).max_abs <= 2 * pytorch.max_abs
    torch.testing.assert_close(lse.double(), expected_lse, **LSE_TOLERANCE)


@pytest.mark.parametrize("optimized_softmax", [False, True])
def test_p_is_rounded_to_the_input_type_and_its_sum_is_not(optimized_softmax):
    """Two keys of weights 1 and w, where w lies far from its bf16 neighbour; v of the second is chosen so
    that o shows whether w was rounded."""
    config = dataclasses.replace(CONFIG, dtype=DType.BF16, optimized_softmax=optimized_softmax)
    w = 2**-9 * (1 + 0.9 * 2**-8)

    def bf16(x: float) -> float:
        return torch.tensor(x).bfloat16().item()

    value, expected = next(
        (value, bf16(bf16(w) * value / (1 + w)))
        for value in (128.0 + i for i in range(128))
        if bf16(bf16(w) * value / (1 + w)) != bf16(w * value / (1 + w))
    )
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (1, 2, 2))
    rest = math.log(w)  # the second key's logit, as a sum of four bf16 numbers
    for i in range(4):
        q[0, 0, 0, i] = 1
        k[0, 1, 0, i] = rest
        rest -= k[0, 1, 0, i].item()
    v[0, 1] = value
    o, lse = torch.empty_like(q), torch.empty(1, 1, 1)
    cpu.attention(config, q, k, v, o, lse, 1.0)
    assert o[0, 0, 0, 0].item() == expected
    assert lse.item() == pytest.approx(math.log1p(w), abs=1e-7)


def test_result_depends_on_neither_batch_nor_layout():
    q, k, v = generate_qkv(QKVConfig(3, 128, 4, 64, DType.FP16))
    o = forward(CONFIG, q, k, v)
    assert torch.equal(forward(CONFIG, q, k, v), o)
    alone = [forward(CONFIG, q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(3)]
    assert torch.equal(torch.cat(alone), o)
    packed = torch.stack((q, k, v), dim=2).unbind(2)
    assert torch.equal(forward(CONFIG, *packed), o)
    transposed = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(forward(CONFIG, *transposed), o)


# ---------------------------------------------------------------------- exact and hand-computed values
def constants(values: list[float], dtype: torch.dtype, d: int = 64) -> torch.Tensor:
    """(1, keys, 1, d) with one value a key."""
    return torch.tensor(values, dtype=dtype)[None, :, None, None].expand(1, -1, 1, d)


@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, optimized_softmax=False)], ids=ids)
@pytest.mark.parametrize("seq_len_q", [1, 129])
@pytest.mark.parametrize(
    ("k", "out", "lse"),
    [([-32.0] * 4, 2.5, -8190.6137), ([-32.0] * 3 + [-31.75], 4.0, -8128.0), ([-32.0], 1.0, -8192.0)],
)
def test_very_negative_scores(config, seq_len_q, k, out, lse):
    q = torch.full((1, seq_len_q, 1, 64), 32.0, dtype=torch.float16)
    v = constants([j + 1.0 for j in range(len(k))], torch.float16)
    o, o_lse = run(config, q, constants(k, torch.float16), v)
    # The fused multiply-add subtracts the rounded product maximum * scale, so that at scores this large
    # the greatest P is only near 1, and its rounding to 16 bits shows.
    torch.testing.assert_close(o, torch.full_like(o, out), atol=2e-3 * config.optimized_softmax, rtol=0)
    torch.testing.assert_close(o_lse, torch.full_like(o_lse, lse), atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 33, 65, 127, 129])
def test_no_phantom_keys(dtype, keys):
    q = torch.ones(1, 5, 1, 64, dtype=dtype)
    o, lse = run(CONFIG, q, constants([-2.5] * keys, dtype), constants([1.0] * keys, dtype))
    assert (o == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, -20 + math.log(keys)), atol=1e-5, rtol=0)


def check_case(q, k, v):
    """Within the element type's tolerance of the reference, and bitwise equal to contiguous copies."""
    o, lse = run(CONFIG, q, k, v)
    expected, expected_lse = reference(q, k, v)
    tolerance = 2e-3 if q.dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, **LSE_TOLERANCE)
    assert torch.equal(run(CONFIG, *(x.contiguous() for x in (q, k, v)))[0], o)
    return o, lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_tensor_has_its_own_strides(dtype):
    shape = (2, 64, 2, 64)
    q, k, v = (ramp(shape, a, dtype) for a in (5, 7, 11))
    every_second = {a: ramp((2, 128, 2, 64), a, dtype)[:, ::2] for a in (7, 11)}
    o, lse = check_case(q, every_second[7], v)
    assert o[0, 0, 0, 0].item() == pytest.approx(0.048275, abs=2e-3)
    assert o[0, 63, 1, 63].item() == pytest.approx(-0.306, abs=4e-3)
    assert lse[0, 0, 0].item() == pytest.approx(6.361428, abs=1e-4)
    assert lse[0, 1, 63].item() == pytest.approx(7.203187, abs=1e-4)
    check_case(q, k, every_second[11])
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for which in range(3):
        check_case(
            *(t if i == which else x for i, (t, x) in enumerate(zip(transposed, (q, k, v), strict=True)))
        )
    check_case(*torch.stack((q, k, v), dim=2).unbind(2))


def test_offsets_past_32_bits():
    """Batch stride 2^31 elements. Of the 4 GiB only a few pages are ever touched."""
    storage = torch.empty(2**31 + 16384, dtype=torch.float16)
    shape = (2, 64, 1, 64)
    q, k, v = (storage[o:].as_strided(shape, (2**31, 64, 64, 1)) for o in (0, 4096, 8192))
    for x, a in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(ramp(shape, a))
    o = forward(CONFIG, q, k, v)
    assert torch.equal(o, forward(CONFIG, *(x.contiguous() for x in (q, k, v))))


@pytest.mark.parametrize("shape", [(65536, 16, 1, 64), (1, 16, 65536, 64), (13108, 16, 5, 64)])
def test_more_than_65535_items(shape):
    config = dataclasses.replace(CONFIG, B_r=16, B_c=16, n_warps=1, V_mma_load_K_tiles=0)
    one = (1, shape[1], 1, 64)
    q, k, v = (ramp(one, a).expand(shape) for a in (5, 7, 11))
    o = torch.full(shape, math.nan, dtype=torch.float16)
    cpu.attention(config, q, k, v, o, None, 0.125)
    assert (o == o[:1, :, :1]).all()
    expected, _ = reference(*(x[:1, :, :1] for x in (q, k, v)))
    torch.testing.assert_close(o[-1:, :, -1:].double(), expected, atol=2e-3, rtol=2e-3)


def test_a_long_query_with_one_key_is_exact():
    seq_len_q = 1 << 20
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16).expand(1, seq_len_q, 1, 64)
    v = ramp((1, 1, 1, 64), 11)
    o = torch.full((1, seq_len_q, 1, 64), math.nan, dtype=torch.float16)
    cpu.attention(CONFIG, q, v, v, o, None, 0.125)
    assert (o == v).all()


@pytest.mark.parametrize("keys", [1, 11, 63, 65, 129, 509])
@pytest.mark.parametrize("queries", [1, 11])
def test_memory_around_the_tensors_never_leaks(keys, queries):
    def guarded(rows: int, a: int) -> torch.Tensor:
        x = torch.full((2, rows + 256, 2, 64), math.nan, dtype=torch.float16)[:, 128 : 128 + rows]
        return x.copy_(ramp((2, rows, 2, 64), a))

    q, k, v = guarded(queries, 5), guarded(keys, 7), guarded(keys, 11)
    around = torch.full((2, queries + 256, 2, 64), 77.0, dtype=torch.float16)
    o = around[:, 128 : 128 + queries]
    cpu.attention(CONFIG, q, k, v, o, None, 0.125)
    expected, _ = reference(q, k, v)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)
    o.fill_(77.0)
    assert (around == 77).all()


def test_nan_in_a_visible_place_is_shown():
    q, k, v = generate_qkv(QKVConfig(1, 128, 2, 64, DType.FP16))
    k[0, 5, 0, 3] = math.nan
    o = forward(CONFIG, q, k, v)
    assert o[:, :, 0].isnan().all()
    assert not o[:, :, 1].isnan().any()
    q, k, v = generate_qkv(QKVConfig(1, 128, 2, 64, DType.FP16))
    v[0, 5, 1, 3] = math.nan
    o = forward(CONFIG, q, k, v)
    assert o[:, :, 1, 3].isnan().all()
    assert o.isnan().sum() == 128


@pytest.mark.perf
def test_two_seconds_for_a_real_size():
    config = dataclasses.replace(CONFIG, d_head=128)
    q, k, v = generate_qkv(QKVConfig(2, 1024, 8, 128, DType.FP16))

    def seconds() -> float:
        begin = time.perf_counter()
        forward(config, q, k, v)
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(3)) < 2


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_callers_precision_of_float32_changes_nothing(precision):
    """ "medium" lets PyTorch round the factors of products to bfloat16."""
    q, k, v = (3 * x for x in generate_qkv(QKVConfig(1, 512, 2, 64, DType.FP16)))
    expected = run(CONFIG, q, k, v)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.testing.assert_close(run(CONFIG, q, k, v), expected, atol=0, rtol=0)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_full_precision_lasts_until_the_last_thread_has_left():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        medium = full_precision._precision()
        context = full_precision.FullPrecision()
        with context:
            with context:
                assert full_precision._precision() in full_precision._EXACT
            assert full_precision._precision() in full_precision._EXACT
        assert full_precision._precision() == medium
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def defaults():
    """Sets PyTorch's default element type and device, for the rest of the test."""
    before = torch.get_default_dtype()

    def set_defaults(dtype: torch.dtype, device: str) -> None:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)

    yield set_defaults
    torch.set_default_device(None)
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.bfloat16, "cpu"), (torch.float16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")],
    ids=str,
)
@pytest.mark.parametrize("features", [{}, {"right": 0, "left": 90}, {"softcap": 5.0}], ids=str)
def test_the_callers_defaults_change_nothing(dtype, device, features, defaults):
    q, k, v = generate_qkv(QKVConfig(1, 256, 2, 64, DType.FP16))
    o, lse = torch.empty_like(q), torch.empty(1, 2, 256)
    cpu.attention(CONFIG, q, k, v, o, lse, 0.125, **features)
    expected = o.clone(), lse.clone()
    defaults(dtype, device)
    cpu.attention(CONFIG, q, k, v, o.zero_(), lse.zero_(), 0.125, **features)
    torch.testing.assert_close((o, lse), expected, atol=0, rtol=0)
