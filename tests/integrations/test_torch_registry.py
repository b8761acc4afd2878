"""PyTorch's registry of flash attentions: what its operators mean there, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, bias, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import attention, sdpa
from flash_attention.compat import torch_registry
from flash_attention.scaled_dot_product import (
    IMPLEMENTATION,
    flash_attention_operator,
    prefer_in_torch,
    register_with_torch,
)

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").bfloat16().to(torch.get_default_device())


def expected(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    return scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=1.6e-2, rtol=1.6e-2)


@pytest.fixture
def active(device: str) -> Iterator[None]:
    """The operators of the test's device are the library's. PyTorch has none of them for the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel of its own is replaced
        activated = torch_registry._Activated(device.upper())
    yield
    activated.remove()


# ---------------------------------------------------------------------- registering
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


def test_one_line_gives_priority_and_restoring_takes_it_back() -> None:
    if not register_with_torch():
        pytest.skip("this torch has no registry")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert prefer_in_torch()
    try:
        assert torch.nn.attention.current_flash_attention_impl() == IMPLEMENTATION
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    torch.nn.attention.activate_flash_attention_impl(IMPLEMENTATION)  # without priority
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    torch.nn.attention.restore_flash_attention_impl()


@needs_registry
@pytest.mark.only_on("cuda")
def test_plain_attention_runs_the_library_when_preferred() -> None:
    query, key, value = random(2, 4, 256, 64), random(2, 4, 256, 64), random(2, 4, 256, 64)
    assert prefer_in_torch()
    try:
        with torch.profiler.profile() as profile:
            got = scaled_dot_product_attention(query, key, value, is_causal=True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert any(event.key == "aten::_scaled_dot_product_flash_attention" for event in profile.key_averages())
    assert (got == sdpa(query, key, value, is_causal=True)).all()


# ---------------------------------------------------------------------- what the operators mean
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(40, 40), (12, 40), (1, 40), (40, 12)])
def test_causal_is_aligned_lower_right(active: None, seq_len_q: int, seq_len_k: int) -> None:
    query, key, value = random(2, 4, seq_len_q, 32), random(2, 4, seq_len_k, 32), random(2, 4, seq_len_k, 32)
    got = OPERATOR(query, key, value, is_causal=True)[0]
    mask = torch.ones(seq_len_q, seq_len_k, dtype=torch.bool).tril(seq_len_k - seq_len_q)
    close(got, expected(query, key, value, attn_mask=mask).nan_to_num(0.0))


@pytest.mark.filterwarnings("ignore:Lower right")
def test_pytorchs_causal_bias_is_right(active: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random(1, 2, 128, 64), random(1, 2, 256, 64), random(1, 2, 256, 64)
    if device == "cpu":  # where PyTorch would not take its flash attention
        monkeypatch.setattr(bias, "can_use_flash_attention", lambda *_: True)
    got = scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(128, 256))
    mask = torch.ones(128, 256, dtype=torch.bool).tril(128)
    close(got, expected(query, key, value, attn_mask=mask))


def test_the_states_of_dropout_are_torchs_and_on_the_device(active: None) -> None:
    x = random(2, 4, 16, 32)
    got, inferred = OPERATOR(x, x, x), OPERATOR(*3 * [x.to("meta")])
    for ours, theirs in zip(got, inferred, strict=True):
        if isinstance(theirs, Tensor):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            assert ours.device == x.device
        else:
            assert ours == theirs


def test_a_query_with_transposed_rows_is_taken(active: None) -> None:
    query = random(2, 4, 32, 16).transpose(2, 3)  # (2, 4, 16, 32), its rows are columns in memory
    key = random(2, 4, 16, 32)
    got = OPERATOR(query, key, key)[0]
    assert got.stride() == torch.empty_like(query).stride()
    close(got, expected(query, key, key))


# ---------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_heads_kv", [4, 2])
def test_pytorchs_autograd_calls_the_backward_operator(
    active: None, is_causal: bool, n_heads_kv: int
) -> None:
    query, key, value = random(2, 4, 40, 32), random(2, n_heads_kv, 40, 32), random(2, n_heads_kv, 40, 32)
    given = [x.requires_grad_() for x in (query, key, value)]
    grad_out = random(2, 4, 40, 32)
    found = torch.autograd.grad(OPERATOR(*given, is_causal=is_causal)[0], given, grad_out)
    wide = [x.detach().double().requires_grad_() for x in given]
    out = scaled_dot_product_attention(*wide, is_causal=is_causal, enable_gqa=True)
    for grad, right in zip(found, torch.autograd.grad(out, wide, grad_out.double()), strict=True):
        assert grad.dtype is torch.bfloat16
        torch.testing.assert_close(grad.double(), right, atol=6e-2, rtol=2e-2)


def test_derivatives_of_the_operator_are_those_of_the_library(active: None) -> None:
    x = random(1, 2, 16, 32)
    rows = x.transpose(1, 2).detach().requires_grad_()
    attention(rows, rows, rows, return_lse=True)[0].float().sum().backward()

    def loss(x: Tensor) -> Tensor:
        return OPERATOR(x, x, x)[0].float().sum()

    grad = torch.func.grad(loss)(x)
    assert torch.equal(grad, rows.grad.transpose(1, 2))
    leaf = x.clone().requires_grad_()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf).backward()
    assert torch.equal(leaf.grad, grad)


def test_tangents_and_dropout_are_refused(active: None) -> None:
    x = random(1, 2, 16, 32)
    with pytest.raises(NotImplementedError, match=r"tangent|forward AD|forward-mode"):
        torch.func.jvp(lambda x: OPERATOR(x, x, x)[0], (x,), (x,))
    out, lse, _, _, n_q, n_k, seed, offset, _ = OPERATOR(x, x, x)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    none = torch.empty(0)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        backward(out, x, x, x, out, lse, none, none, n_q, n_k, 0.1, False, seed, offset)


def test_autograd_is_pytorchs_again_after_removal() -> None:
    names = [torch_registry.FORWARD, torch_registry.BACKWARD]
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in names]
    for device_type in ("CPU", "CUDA"):
        activated = torch_registry._Activated(device_type)
        assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] != before
        activated.remove()
        assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] == before


def test_compiled_code_accepts_what_the_operator_returns(active: None, device: str) -> None:
    x = random(1, 2, 16, 32)

    def all_results(x: Tensor) -> tuple[Tensor, ...]:
        out, lse, _, _, _, _, seed, offset, _ = OPERATOR(x, x, x, is_causal=True)
        return out * 2, lse, seed, offset

    backend = "inductor" if device == "cuda" else "aot_eager"
    got = torch.compile(all_results, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got[:2], all_results(x)[:2])
