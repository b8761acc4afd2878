"""Arrays of other libraries go in and come out, without a copy on the way."""

from __future__ import annotations

import re
import sys
import types

import numpy as np
import pytest
import torch

from flash_attention import attention, attention_varlen, forward
from flash_attention.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_helpers.kernel_configs import parse_kernel_name_into_config

CONFIG = parse_kernel_name_into_config(
    "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
)


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)


@pytest.mark.only_on("cpu")
def test_attention_gives_arrays() -> None:
    q, k, v = array(2, 5, 4, 16), array(2, 9, 2, 16), array(2, 9, 2, 16)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = attention(tensor(q), tensor(k), tensor(v), causal=True, return_lse=True)
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    assert (tensor(out) == expected[0]).all()
    assert (tensor(lse) == expected[1]).all()


@pytest.mark.only_on("cpu")
def test_out_and_sinks_may_be_arrays() -> None:
    q, sinks, out = array(2, 5, 4, 16), array(4).astype(np.float32), np.zeros((2, 5, 4, 16), np.float16)
    result = attention(q, q, q, sinks=sinks, out=out)
    assert np.shares_memory(result, out)
    assert (tensor(out) == attention(*3 * [tensor(q)], sinks=tensor(sinks))).all()


@pytest.mark.only_on("cpu")
def test_packed_sequences() -> None:
    q, offsets = array(9, 2, 16), np.array([0, 4, 9], np.int32)
    out = attention_varlen(q, q, q, offsets, offsets, 5, 5)
    expected = attention_varlen(*3 * [tensor(q)], *2 * [tensor(offsets)], 5, 5)
    assert isinstance(out, np.ndarray)
    assert (tensor(out) == expected).all()


@pytest.mark.only_on("cpu")
def test_forward() -> None:
    q = array(1, 64, 2, 64)
    out = forward(CONFIG, q, q, q)
    assert isinstance(out, np.ndarray)
    assert (tensor(out) == forward(CONFIG, *3 * [tensor(q)])).all()
    given = np.zeros_like(q)
    forward(CONFIG, q, q, q, given)
    assert (given == out).all()


@pytest.mark.only_on("cpu")
def test_tensors_and_arrays_may_be_mixed() -> None:
    q = array(1, 5, 2, 16)
    assert isinstance(attention(q, tensor(q), q), np.ndarray)
    assert isinstance(attention(tensor(q), q, q), torch.Tensor)
    q = array(1, 64, 2, 64)
    given = np.zeros_like(q)
    assert isinstance(forward(CONFIG, q, tensor(q), q), np.ndarray)
    assert isinstance(forward(CONFIG, tensor(q), tensor(q), tensor(q), given), torch.Tensor)
    assert (tensor(given) == forward(CONFIG, tensor(q), q, tensor(q))).all()


@pytest.mark.only_on("cpu")
def test_what_nobody_may_write_is_no_output() -> None:
    """torch would: it does not ask."""
    q = array(1, 64, 2, 64)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out is a numpy\.ndarray that may not be written: pass out=None"):
        attention(q, q, q, out=out)
    with pytest.raises(ValueError, match=r"o is a numpy\.ndarray that may not be written: pass o=None"):
        forward(CONFIG, q, q, q, out)
    assert (out == 0).all()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"causal": "no"}, "causal is 'no'; it must be True or False"),
        ({"softmax_scale": "0.5"}, "softmax_scale is '0.5'; it must be a real number"),
        ({"config": "(FP16, 64)"}, "config is a str; it must be a FlashForwardKernelConfig"),
        ({"out": [0.0]}, "out is a list; it must be a torch.Tensor"),
    ],
)
def test_options_are_checked_as_with_tensors(options: dict, text: str) -> None:
    q = array(1, 5, 2, 16)
    for x in (q, tensor(q)):
        with pytest.raises(TypeError, match=re.escape(text)):
            attention(x, x, x, **options)
    with pytest.raises(TypeError, match="cu_seqlens_q is a list"):
        attention_varlen(q[0], q[0], q[0], [0, 5], [0, 5], 5, 5)
    far = attention(q, q, q, window=(1 << 70, None))  # more than an operator's argument holds
    assert (far == attention(q, q, q)).all()


class Foreign:
    """An array of a library that is not installed here."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __dlpack__(self, **options: object) -> object:
        return self.x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("place", ["foreign", "foreign.dlpack"])
def test_a_librarys_from_dlpack_is_found(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(Foreign, "__module__", "foreign.core.arrays")
    module = types.ModuleType(place)
    module.from_dlpack = lambda x: Foreign(torch.from_dlpack(x))
    monkeypatch.setitem(sys.modules, place, module)
    x = torch.ones(1, 5, 2, 16, dtype=torch.bfloat16)
    out = attention(Foreign(x), Foreign(x), Foreign(x))
    assert isinstance(out, Foreign)
    assert (out.x == 1).all()


def test_a_library_without_from_dlpack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foreign, "__module__", "nobody.core")
    x = Foreign(torch.ones(1, 5, 2, 16, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="nobody has no from_dlpack"):
        attention(x, x, x)


@pytest.mark.only_on("cpu")
def test_what_torch_cannot_take_is_explained() -> None:
    q = array(1, 5, 2, 16)
    with pytest.raises(ValueError, match=r"this numpy\.ndarray by DLPack"):
        attention(*3 * [q.astype(np.longdouble)])
    with pytest.raises(TypeError, match=r"torch\.float64"):
        attention(*3 * [q.astype(np.float64)])


# ---------------------------------------------------------------------- other libraries, where installed
@pytest.mark.only_on("cuda")
def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    q = cupy.asarray(array(2, 70, 4, 64))
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    expected = attention(*3 * [torch.from_dlpack(q)], causal=True, return_lse=True)
    for got, wanted in zip((out, lse), expected, strict=True):
        assert isinstance(got, cupy.ndarray)
        assert (torch.from_dlpack(got) == wanted).all()
    q = cupy.asarray(array(2, 128, 4, 64))
    given = cupy.zeros_like(q)
    forward(CONFIG, q, q, q, given)
    assert (torch.from_dlpack(given) == forward(CONFIG, *3 * [torch.from_dlpack(q)])).all()


def test_jax(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    q = jax.device_put(array(1, 70, 2, 64), jax.devices(device)[0])
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    expected = attention(*3 * [torch.from_dlpack(q)], causal=True, return_lse=True)
    for got, wanted in zip((out, lse), expected, strict=True):
        assert isinstance(got, jax.Array)
        assert got.devices() == q.devices()
        assert (torch.from_dlpack(got) == wanted).all()


@pytest.mark.only_on("cpu")
def test_an_array_that_runs_backwards_is_refused() -> None:
    q = array(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"strides are \(512, -64, 32, 2\) bytes.*ascontiguousarray"):
        attention(q[:, ::-1], q, q)
    assert (attention(np.ascontiguousarray(q[:, ::-1]), q, q) == attention(q, q, q)[:, ::-1]).all()


@pytest.mark.only_on("cpu")
def test_masked_arrays_are_refused() -> None:
    q = array(2, 5, 4, 16)
    for masked in (np.ma.array(q, mask=np.ones_like(q, bool)), np.ma.array(q)):
        with pytest.raises(ValueError, match=r"its mask would be lost\. Pass x\.data"):
            attention(masked, q, q)
        with pytest.raises(ValueError, match="its mask would be lost"):
            attention(q, q, q, out=masked)


@pytest.mark.only_on("cpu")
def test_results_of_a_type_that_the_library_lacks() -> None:
    q = array(2, 5, 4, 16).astype(np.float32)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            TypeError, match=r"^the result is torch\.bfloat16, which numpy does not take: .*float16"
        ),
    ):
        attention(q, q, q)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("names", ["q k v", "q", "k"])
@pytest.mark.parametrize("d_head", [12, 16])
def test_functions_of_flash_attn_take_tensors_alone(d_head: int, names: str) -> None:
    q = array(1, 4, 2, d_head)
    given = {name: q if name in names.split() else tensor(q) for name in "qkv"}
    with pytest.raises(TypeError, match=rf"^{names[0]} is an ndarray; it must be a torch\.Tensor"):
        flash_attn_func(**given, return_attn_probs=True)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=rf"^{names[0]} is an ndarray; it must be a torch\.Tensor"):
        flash_attn_varlen_func(
            **{name: x[0] for name, x in given.items()},
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=4,
            max_seqlen_k=4,
        )
