"""PyTorch's signature and meaning of attention, and its registry."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import sdpa
from flash_attention.compat.torch_registry import (
    IMPLEMENTATION,
    flash_attention_operator,
    register_with_torch,
)


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
    with pytest.raises(NotImplementedError, match=r"^attn_mask is"):
        sdpa(x, x, x, torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"^dropout_p is 0\.5"):
        sdpa(x, x, x, dropout_p=0.5)
    with pytest.raises(NotImplementedError, match=r"^dropout_p is a tensor of shape \(2,\)"):
        sdpa(x, x, x, dropout_p=torch.zeros(2))
    with pytest.raises(TypeError, match="enable_gqa is 'False'; it must be True or False"):
        sdpa(x, x[:, :1], x[:, :1], enable_gqa="False")
    with pytest.raises(TypeError, match=r"torch\.float32"):
        sdpa(x.float(), x.float(), x.float())
    with pytest.raises(ValueError, match="query, key and value must be"):
        sdpa(x, x[0], x)


def test_what_is_no_tensor_is_named() -> None:
    x = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="value is a NoneType"):
        sdpa(x, x, None)


def test_compiled_without_recompilation() -> None:
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, fullgraph=True, backend=counter)
    for seq_len in (16, 24, 40):
        x = random(2, 4, seq_len, 32)
        assert (compiled(x, x, x, is_causal=True) == sdpa(x, x, x, is_causal=True)).all()
    assert counter.frame_count == 2


# ---------------------------------------------------------------------- PyTorch's registry
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@needs_registry
def test_the_registry_knows_the_library() -> None:
    assert register_with_torch()
    assert IMPLEMENTATION in torch.nn.attention.list_flash_attention_impls()


@needs_registry
def test_activation_replaces_pytorchs_operator_until_restored() -> None:
    register_with_torch()
    operator = "aten::_scaled_dot_product_flash_attention"
    before = torch._C._dispatch_dump(operator)
    torch.nn.attention.activate_flash_attention_impl(IMPLEMENTATION)
    try:
        assert "torch_registry.py" in torch._C._dispatch_dump(operator)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch._C._dispatch_dump(operator) == before


def test_a_torch_without_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    assert not register_with_torch()


@needs_registry
@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorchs_function_runs_the_library_when_activated(is_causal: bool) -> None:
    query, key, value = random(2, 4, 50, 64), random(2, 4, 50, 64), random(2, 4, 50, 64)
    register_with_torch()
    torch.nn.attention.activate_flash_attention_impl(IMPLEMENTATION)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    close(got, expected(query, key, value, is_causal=is_causal))
    assert (got == sdpa(query, key, value, is_causal=is_causal)).all()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(16, 16), (5, 16)])
def test_the_operator_gives_what_pytorchs_gives(seq_len_q: int, seq_len_k: int) -> None:
    query, key, value = random(2, 4, seq_len_q, 32), random(2, 4, seq_len_k, 32), random(2, 4, seq_len_k, 32)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    got = flash_attention_operator(query, key, value, scale=0.3)
    assert got[0].stride() == query.stride()
    theirs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=0.3)
    close(got[0], expected(query, key, value, scale=0.3))
    torch.testing.assert_close(got[1], theirs[1].view_as(got[1]), atol=1e-3, rtol=0)
    assert len(got) == len(torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns)
    for name in ("dropout_p", "return_debug_mask"):
        with pytest.raises(NotImplementedError, match=rf"^{name} is "):
            flash_attention_operator(query, key, value, **{name: 1})
