"""``merge``: what parts of the keys give together, its gradients, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attention import merge
from flash_attention.merge import merge_into, merge_sinks_into

INF = math.inf


def part(value: float, lse: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.full((1, 3, 2, 4), value, dtype=dtype), torch.full((1, 2, 3), lse)


def test_weights_are_those_of_the_softmax() -> None:
    (a, lse_a), (b, lse_b) = part(1.0, math.log(3)), part(5.0, math.log(1))
    out, lse = merge([a, b], [lse_a, lse_b])
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


def test_one_part_is_itself() -> None:
    a, lse_a = torch.randn(2, 5, 3, 8), torch.randn(2, 3, 5)
    out, lse = merge([a], [lse_a])
    torch.testing.assert_close(out, a)
    torch.testing.assert_close(lse, lse_a)


def test_batches() -> None:
    outputs, lses = torch.randn(2, 2, 7, 3, 8), torch.randn(2, 2, 3, 7)
    out, lse = merge(list(outputs), list(lses))
    weights = torch.softmax(lses, 0).transpose(2, 3)[..., None]
    torch.testing.assert_close(out, (weights * outputs).sum(0))
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0))


def test_packed_tensors() -> None:
    outputs, lses = torch.randn(2, 7, 3, 8), torch.randn(2, 3, 7)
    out, lse = merge(list(outputs), list(lses))
    weights = torch.softmax(lses, 0).transpose(1, 2)[..., None]
    torch.testing.assert_close(out, (weights * outputs).sum(0))
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0))


def test_a_part_without_keys_takes_no_part_whatever_it_holds() -> None:
    (a, lse_a), (b, lse_b) = part(2.0, 0.5), part(math.nan, -INF)
    for parts in (([a, b], [lse_a, lse_b]), ([b, a], [lse_b, lse_a])):
        out, lse = merge(*parts)
        assert (out == 2.0).all()
        assert torch.equal(lse, lse_a)
    out, lse = merge([b, b], [lse_b, lse_b])
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_a_sink_of_infinity_takes_all_the_weight() -> None:
    (a, lse_a), (b, lse_b) = part(2.0, 0.5), part(0.0, INF)
    out, lse = merge([a, b], [lse_a, lse_b])
    assert (out == 0).all()
    assert (lse == INF).all()


def test_nan_shows() -> None:
    (a, lse_a), (b, lse_b) = part(2.0, 0.5), part(1.0, math.nan)
    out, lse = merge([a, b], [lse_a, lse_b])
    assert out.isnan().all()
    assert lse.isnan().all()


def test_far_lses_do_not_overflow() -> None:
    (a, lse_a), (b, lse_b) = part(2.0, 1e30), part(1.0, -1e30)
    out, lse = merge([a, b], [lse_a, lse_b])
    assert (out == 2).all()
    assert torch.equal(lse, lse_a)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_float32_and_rounded_once(dtype: torch.dtype) -> None:
    outputs, lses = torch.randn(4, 1, 3, 2, 8).to(dtype), torch.randn(4, 1, 2, 3)
    exact, _ = merge([x.float() for x in outputs], list(lses))
    out, _ = merge(list(outputs), list(lses))
    assert torch.equal(out, exact.to(dtype))
    wide, _ = merge(list(outputs), list(lses), out_dtype=torch.float32)
    assert torch.equal(wide, exact)


def test_gradients() -> None:
    torch.manual_seed(0)
    outputs = [torch.randn(1, 2, 2, 3, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, requires_grad=True) for _ in range(3)]
    out, lse = merge(outputs, lses)
    weights_out, weights_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out * weights_out).sum() + (lse * weights_lse).sum(), [*outputs, *lses])
    stacked = torch.stack(lses)
    shares = torch.softmax(stacked, 0).transpose(2, 3)[..., None]
    plain = (shares * torch.stack(outputs)).sum(0)
    loss = (plain * weights_out).sum() + (torch.logsumexp(stacked, 0) * weights_lse).sum()
    for a, b in zip(found, torch.autograd.grad(loss, [*outputs, *lses]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_gradients_of_parts_without_keys_are_zero() -> None:
    (a, lse_a), (b, lse_b) = part(2.0, 0.5), part(math.nan, -INF)
    given = [x.requires_grad_() for x in (a, b, lse_a, lse_b)]
    out, lse = merge([a, b], [lse_a, lse_b])
    grads = torch.autograd.grad(out.sum() + lse.sum(), given)
    assert (grads[0] == 1).all()
    assert (grads[1] == 0).all()
    assert (grads[3] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    out, lse = merge([b], [lse_b])
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), [b, lse_b]))


OUT, LSE = part(1.0, 0.0)


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        ([], [], "at least one part"),
        ([OUT], [], "outputs has 1 parts and lses 0"),
        ([OUT, OUT[:, :2]], [LSE, LSE], r"outputs\[1\] is \(1, 2, 2, 4\)"),
        ([OUT, OUT.half()], [LSE, LSE], r"outputs\[1\] is .* torch.float16"),
        ([OUT], [LSE.transpose(1, 2)], r"lses\[0\] is \(1, 3, 2\) .* must be \(1, 2, 3\)"),
        ([OUT], [LSE.half()], "it must be float32 or float64"),
        ([OUT[0, 0]], [LSE], r"outputs\[0\] has shape \(2, 4\)"),
        ([OUT.int()], [LSE], "of a floating type"),
    ],
)
def test_refusals(outputs: list[Tensor], lses: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(outputs, lses)


def test_what_is_no_list_of_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="outputs is a Tensor; it must be a list"):
        merge(OUT, LSE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lses\[0\] is a float"):
        merge([OUT], [1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"out_dtype is torch.int8"):
        merge([OUT], [LSE], out_dtype=torch.int8)


def parts_of(number: int) -> tuple[list[Tensor], list[Tensor]]:
    """Random parts; some rows are in no part, some in one alone."""
    outputs, lses = list(torch.randn(number, 2, 7, 3, 8)), list(torch.randn(number, 2, 3, 7) * 20)
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        for row in (0, 1) if i else (0,):
            output[:, row], lse[:, :, row] = 0.0, -INF
    return outputs, lses


@pytest.mark.parametrize("number", [2, 3, 50])
def test_in_place_is_the_same_but_for_rounding(number: int) -> None:
    outputs, lses = parts_of(number)
    out, lse = outputs[0].clone(), lses[0].clone()
    for output, part_lse in zip(outputs[1:], lses[1:], strict=True):
        merge_into(out, lse, output, part_lse)
    wanted, wanted_lse = merge(outputs, lses)
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-6)
    assert (out[:, 0] == 0).all()
    assert torch.equal(out[:, 1], outputs[0][:, 1])


def test_sinks_in_place_are_a_part_without_a_value() -> None:
    for sinks in (torch.randn(3) * 10, torch.full((3,), -INF)):
        (out,), (lse,) = parts_of(1)
        logits = sinks[None, :, None].expand_as(lse)
        wanted, wanted_lse = merge([out, torch.zeros_like(out)], [lse, logits])
        merge_sinks_into(out, lse, sinks)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, wanted_lse)


def test_arrays_of_numpy_are_taken_and_given():
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 5, 3, 8, generator=generator).half() for _ in range(2)]
    lses = [torch.randn(2, 3, 5, generator=generator) for _ in range(2)]
    expected = merge(outputs, lses)
    found = merge([x.numpy() for x in outputs], [x.numpy() for x in lses])
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, y.numpy())
    mixed, lse = merge(outputs, [x.numpy() for x in lses])
    assert torch.equal(mixed, expected[0])
    assert torch.equal(lse, expected[1])
    wide, _ = merge([x.numpy() for x in outputs], lses, out_dtype=torch.float32)
    assert wide.dtype == np.float32
    with pytest.raises(ValueError, match="its mask would be lost"):
        merge([np.ma.masked_array(outputs[0].numpy())], lses[:1])
    with pytest.raises(TypeError, match=r"lses\[0\] is a str; it must be a tensor"):
        merge([outputs[0].numpy()], ["lse"])
