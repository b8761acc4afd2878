"""PyTorch's signature and meaning of attention."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import sdpa


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").bfloat16().to(torch.get_default_device())


def expected(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    return scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=1.6e-2, rtol=1.6e-2)


def test_signature_is_pytorchs() -> None:
    # dropout_p and the rest of the builtin's signature stand in the first lines of its documentation.
    text = scaled_dot_product_attention.__doc__.split("->")[0]
    for name, parameter in inspect.signature(sdpa).parameters.items():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
        assert f"{name}{default}" in text.replace("query, key, value", "query key value"), name


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(40, 40), (7, 30), (30, 7), (1, 9), (9, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_and_alignment(seq_len_q: int, seq_len_k: int, is_causal: bool) -> None:
    query, key, value = random(2, 4, seq_len_q, 32), random(2, 4, seq_len_k, 32), random(2, 4, seq_len_k, 16)
    got = sdpa(query, key, value, is_causal=is_causal)
    assert got.shape == (2, 4, seq_len_q, 16)
    close(got, expected(query, key, value, is_causal=is_causal))


@pytest.mark.parametrize("leading", [(), (4,), (3, 2, 4)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    query, key, value = (random(*leading, n, 32) for n in (6, 8, 8))
    got = sdpa(query, key, value, is_causal=True, scale=0.3)
    assert got.shape == query.shape
    close(got, expected(query, key, value, is_causal=True, scale=0.3))


def test_leading_dimensions_that_differ_are_not_paired() -> None:
    query, key = random(2, 3, 4, 6, 32), random(3, 2, 4, 6, 32)
    for other in (key, key.reshape(6, 1, 4, 6, 32)):
        with pytest.raises(ValueError, match="must agree in all dimensions before n_heads"):
            sdpa(query, other, other)
        with pytest.raises(ValueError, match="must agree in all dimensions before n_heads"):
            sdpa(query, query, other)
    assert sdpa(*3 * [random(2, 3, 4, 0, 32)]).shape == (2, 3, 4, 0, 32)


def test_grouped_heads_only_when_enabled() -> None:
    query, key = random(2, 4, 6, 32), random(2, 2, 6, 32)
    close(sdpa(query, key, key, enable_gqa=True), expected(query, key, key, enable_gqa=True))
    with pytest.raises(ValueError, match="query has 4 heads, key 2"):
        sdpa(query, key, key)


def test_what_is_refused_is_named() -> None:
    x = random(1, 2, 6, 32)
    with pytest.raises(TypeError, match=r"^attn_mask has the type torch\.int64; it must be bool"):
        sdpa(x, x, x, torch.ones(6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^attn_mask has shape \(6, 5\); .* broadcast to \(1, 2, 6, 6\)"):
        sdpa(x, x, x, torch.ones(6, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^dropout_p is 1\.5"):
        sdpa(x, x, x, dropout_p=1.5)
    with pytest.raises(TypeError, match=r"^dropout_p is a tensor of shape \(2,\)"):
        sdpa(x, x, x, dropout_p=torch.zeros(2))
    with pytest.raises(TypeError, match="enable_gqa is 'False'; it must be True or False"):
        sdpa(x, x[:, :1], x[:, :1], enable_gqa="False")
    with pytest.raises(TypeError, match=r"torch\.float32"):
        sdpa(x.float(), x.float(), x.float())
    with pytest.raises(ValueError, match="query, key and value must be"):
        sdpa(x, x[0], x)


def test_what_is_no_tensor_is_named() -> None:
    x = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="value is None"):
        sdpa(x, x, None)


def test_compiled_without_recompilation() -> None:
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, fullgraph=True, backend=counter)
    for seq_len in (16, 24, 40):
        x = random(2, 4, seq_len, 32)
        assert (compiled(x, x, x, is_causal=True) == sdpa(x, x, x, is_causal=True)).all()
    assert counter.frame_count == 2
