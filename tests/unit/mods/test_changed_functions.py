"""What a function reads has changed between two calls: the second one computes with what is there then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention
from flash_attention.mods import dense_bias

pytestmark = pytest.mark.unit
SEQ = 24
SCALE = 1.0


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, SEQ, 2, 16, generator=generator).half() for _ in range(3))
    return q, k, v


def of_its_length(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    def change() -> None:
        table.data = torch.linspace(-3, 3, 5)

    return (lambda s, b, h, i, j: s + table[j % table.shape[0]]), change


def of_rows(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    rows = table.new_zeros(SEQ, 4)

    def change() -> None:
        rows.data = torch.arange(SEQ * 9).view(SEQ, 9).float() / 50

    return (lambda s, b, h, i, j: s + rows[j].sum(-1)), change


def of_an_attribute(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    table.scale = 1.0  # type: ignore[attr-defined]

    def change() -> None:
        table.scale = 9.0  # type: ignore[attr-defined]

    return (lambda s, b, h, i, j: s * table.scale + table[j]), change  # type: ignore[attr-defined]


def of_two_views(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    view = table.view(SEQ)

    def change() -> None:
        view.data = torch.linspace(2, -2, SEQ)

    return (lambda s, b, h, i, j: s + table[j] * 2 + view[i] * view[j]), change


def of_requires_grad(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    def change() -> None:
        table.requires_grad_()

    return (lambda s, b, h, i, j: s * 9 if table.requires_grad else s + table[j]), change


@functools.wraps(torch.relu)
def _wrapped(x: Any) -> Any:
    return x * SCALE


def of_a_wrapped_helper(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    def change() -> None:
        globals()["SCALE"] = 7.0

    return (lambda s, b, h, i, j: _wrapped(s) + table[j]), change


def of_a_switch(table: Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    def change() -> None:
        torch.set_grad_enabled(False)

    return (lambda s, b, h, i, j: s + table[j] if torch.is_grad_enabled() else s * 5), change


CHANGES = [
    of_its_length, of_rows, of_an_attribute, of_two_views, of_requires_grad, of_a_wrapped_helper, of_a_switch,
]  # fmt: skip


@pytest.mark.parametrize("made", CHANGES, ids=lambda made: made.__name__)
def test_a_changed_function_is_recorded_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    q, k, v = inputs()
    function, change = made(torch.linspace(-1, 1, SEQ))
    with torch.enable_grad():
        for _ in range(3):
            first = attention(q, k, v, score_mod=function)
        change()
        found = attention(q, k, v, score_mod=function)
        # Another object of the same code, with nothing remembered of it: what is held decides.
        right = attention(q, k, v, score_mod=lambda *given: function(*given))
    assert torch.equal(found, right)
    assert not torch.equal(found, first)


@pytest.mark.parametrize("shape", [(2, 1, SEQ), (2, SEQ, SEQ), (1, 1, SEQ)], ids=str)
def test_a_bias_made_without_gradients_has_one(shape: tuple[int, ...]) -> None:
    bias = torch.nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))
    with torch.no_grad():
        function = dense_bias(bias)
    q, k, v = inputs()
    attention(q, k, v, score_mod=function).float().square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.any()
