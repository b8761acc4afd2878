"""``Sums`` beside plain sums of whole tensors, and copies of sixteen bytes beside ``copy_``."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flash_attention.distributed.copies import contiguous, copy
from flash_attention.distributed.sums import Sums

ROWS, HEADS = 12, 4


def whole(batch: int = 2, d: int = 3) -> Tensor:
    return torch.zeros(batch, ROWS, HEADS, d)


def share(
    rows: range, heads: tuple[int, int], dtype: torch.dtype, chance: random.Random
) -> tuple[Tensor, ...]:
    """Small integers, which every type holds and adds exactly, of two tensors."""
    shape = (2, len(rows), heads[1] - heads[0])
    return tuple(
        torch.tensor([chance.randint(-4, 4) for _ in range(shape[0] * shape[1] * shape[2] * d)], dtype=dtype)
        .view(*shape, d)
        .clone()
        for d in (3, 2)
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_shares_of_any_rows_and_heads_add_up(seed: int, strided: bool) -> None:
    chance = random.Random(seed)
    sums, wanted = Sums(ROWS, HEADS), (whole(), whole(d=2))
    for _ in range(chance.randint(0, 7)):
        first, head = chance.randrange(ROWS), chance.randrange(HEADS)
        step = chance.choice([1, 2, 3]) if strided else 1
        rows = range(first, chance.randint(first + 1, ROWS), step)
        heads = (head, chance.randint(head + 1, HEADS))
        dtype = chance.choice([torch.float32, torch.bfloat16])
        parts = share(rows, heads, dtype, chance)
        for x, part in zip(wanted, parts, strict=True):
            x[:, rows.start : rows.stop : rows.step, heads[0] : heads[1]] += part
        sums.add(parts, rows, None if heads == (0, HEADS) and chance.random() < 0.5 else heads)
    first = chance.randrange(ROWS)
    some = range(first, chance.randint(first + 1, ROWS))
    for rows in (range(ROWS), some):
        found = [torch.full_like(x[:, : len(rows)], 7, dtype=torch.bfloat16) for x in wanted]
        sums.write(found, rows)
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x.float(), y[:, rows.start : rows.stop])
    # The same, moved to rows 3 to 8 of others that have more heads.
    other = Sums(ROWS, HEADS + 2)
    sums.move(range(2, 7), other, range(3, 8), (1, 1 + HEADS))
    moved = [x.new_empty(2, ROWS, HEADS + 2, x.shape[3]) for x in wanted]
    other.write(moved)
    for x, y in zip(moved, wanted, strict=True):
        assert torch.equal(x[:, 3:8, 1 : 1 + HEADS], y[:, 2:7])
        x[:, 3:8, 1 : 1 + HEADS] = 0
        assert not x.any()


def test_a_sum_is_rounded_once() -> None:
    """The sum of these is 1 + 2^-8; where bfloat16 holds what is between, it comes out below 1."""
    terms = [torch.full((1, 1, 1, 1), x, dtype=torch.bfloat16) for x in (1.0, 2**-8, 2**-8, -(2**-8))]
    sums = Sums(1, 1)
    for term in terms:
        sums.add((term,), range(1))
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty(1, 1, 1, 1, dtype=dtype)
        sums.write((found,))
        assert found.item() == torch.tensor(1 + 2**-8).to(dtype).item()


def test_a_share_may_lie_where_the_sum_is_written() -> None:
    result = torch.arange(24.0).view(1, 6, 4, 1).bfloat16()
    wanted, place = result.clone(), result.data_ptr()
    sums = Sums(6, 4)
    sums.add((result,), range(6))
    sums.add((torch.ones(1, 2, 1, 1),), range(3, 5), (1, 2))
    sums.write((result,))
    wanted[:, 3:5, 1:2] += 1
    assert torch.equal(result, wanted)
    assert result.data_ptr() == place


@pytest.mark.parametrize("d", [8, 12, 16])  # 12 numbers are no whole number of sixteen bytes
@pytest.mark.parametrize("first", [0, 1])
def test_copies_are_those_of_torch(d: int, first: int) -> None:
    x = torch.randn(2, 5, 6, 24).bfloat16()
    x[0, 0, 0, 0], x[0, 1, 2, 1] = torch.nan, -torch.inf
    views = [x[:, 1:4, 2:5, first : first + d], x[:, :, first, :d], x[:, ::2, ::3, :d], x.transpose(1, 2)]
    for view in views:
        bits = view.contiguous().view(torch.int16)
        assert torch.equal(contiguous(view).view(torch.int16), bits)
        assert contiguous(view).is_contiguous()
        into = torch.zeros(*view.shape[:-1], 40, dtype=x.dtype)[..., 8 : 8 + view.shape[-1]]
        copy(into, view)
        assert torch.equal(into.contiguous().view(torch.int16), bits)
    wide = torch.empty(views[0].shape)
    copy(wide, views[0])
    assert torch.equal(wide.nan_to_num(), views[0].float().nan_to_num())
