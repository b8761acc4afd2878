"""Layouts: every position on one rank, shards that come back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attention.distributed import Layout

ENDS = (0, 5, 5, 9, 21)


def every(total: int, world: int) -> list[Layout]:
    dealt = [list(range(rank, total, world))[::-1] for rank in range(world)]
    return [
        Layout.contiguous(total, world),
        Layout.zigzag(total, world),
        Layout.striped(total, world),
        Layout.striped(total, world, block=4),
        Layout.windowed(total, world, 9),
        Layout.explicit(dealt),
        *([Layout.per_document(ENDS, world)] if total == ENDS[-1] else []),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("total", [0, 1, 21, 64])
def test_shards_come_back_in_their_order(total: int, world: int) -> None:
    x = torch.arange(total * 2).view(1, total, 2)
    for layout in every(total, world):
        assert sum(layout.lengths) == total
        shards = [layout.shard(x, rank) for rank in range(world)]
        assert [s.shape[1] for s in shards] == list(layout.lengths)
        assert torch.equal(layout.unshard(shards), x)
        for rank, shard in enumerate(shards):
            assert torch.equal(shard[0, :, 0], 2 * layout.positions(rank))


def test_parts_are_as_equal_as_can_be() -> None:
    assert Layout.zigzag(64, 4).ranks[1] == (range(8, 16), range(48, 56))
    assert max(Layout.zigzag(61, 4).lengths) - min(Layout.zigzag(61, 4).lengths) <= 2
    assert Layout.contiguous(5, 4).lengths == (2, 2, 1, 0)  # as torch.chunk and DTensor cut
    assert Layout.striped(10, 4).lengths == (3, 3, 2, 2)
    assert Layout.zigzag(64, 4).ranks[3] == (range(24, 40),)  # side by side


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_of_a_window_have_equal_rows_and_work(world: int) -> None:
    layout = Layout.windowed(16384, world, 4096)
    rows, work = layout.lengths, []
    for rank in range(world):
        places = layout.positions(rank)
        work.append(int((places.clamp(max=4096) + 1).sum()))
    assert max(rows) - min(rows) <= 2
    assert max(work) <= 1.001 * min(work)
    zigzag = [
        int((Layout.zigzag(16384, world).positions(rank).clamp(max=4096) + 1).sum()) for rank in range(world)
    ]
    assert max(zigzag) > 1.1 * min(zigzag)


def test_leftover_rows_of_documents_are_dealt_to_all_ranks() -> None:
    layout = Layout.per_document(range(0, 41), 4)  # forty documents of one row
    assert layout.lengths == (10, 10, 10, 10)


def test_shard_and_unshard_have_gradients() -> None:
    layout = Layout.zigzag(9, 2)
    x = torch.randn(1, 9, 2, requires_grad=True)
    (2 * layout.unshard([layout.shard(x, rank) for rank in range(2)])).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2).all()


def test_layouts_are_values() -> None:
    assert Layout.zigzag(64, 4) == Layout.zigzag(64, 4)
    assert hash(Layout.zigzag(64, 4)) == hash(Layout.zigzag(64, 4))
    ends = torch.tensor([0, 30, 64], dtype=torch.int32)
    assert Layout.zigzag(64, 4, documents=ends) != Layout.zigzag(64, 4)
    assert Layout.zigzag(64, 4, documents=ends).documents == (0, 30, 64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout.zigzag(8, 0), ValueError, r"^world is 0; it must be an int, at least 1"),
        (lambda: Layout.zigzag(-1, 2), ValueError, r"^total is -1; it must be an int, at least 0"),
        (lambda: Layout.zigzag(8.0, 2), TypeError, r"^total is 8.0; it must be an int"),  # type: ignore[arg-type]
        (lambda: Layout.windowed(8, 2, -1), ValueError, r"^window is -1; it must be an int, at least 0"),
        (lambda: Layout.striped(8, 2, block=0), ValueError, r"^block is 0; it must be an int, at least 1"),
        (lambda: Layout.explicit([[0, 1], [1, 2]]), ValueError, r"^position 1 belongs to two rows"),
        (lambda: Layout.explicit([[0, 1], [3]]), ValueError, r"^position 3 is none of 0 to 2"),
        (lambda: Layout.explicit([]), ValueError, r"^the layout has no rank"),
        (lambda: Layout.explicit([["a"]]), TypeError, r"^positions has 'a'; it must hold integers"),  # type: ignore[list-item]
        (lambda: Layout.zigzag(8, 2, documents=[0, 9]), ValueError, r"^documents is \(0, 9\); it must begin"),
        (lambda: Layout.zigzag(8, 2, documents=[0, 5, 4, 8]), ValueError, r"never decrease"),
        (lambda: Layout.per_document([], 2), ValueError, r"^documents is empty"),
        (lambda: Layout.zigzag(8, 2, documents=8), TypeError, r"^documents is 8; it must be integers in a"),  # type: ignore[arg-type]
        (lambda: Layout.explicit([1, 2]), TypeError, r"^positions has 1; it must be integers in a list"),  # type: ignore[list-item]
        (lambda: Layout("x", 8, ((range(7, -1, -1),),)), ValueError, r"^ranks has range\(7, -1, -1\)"),
        (lambda: Layout("x", 8, ((range(8), range(0)),)), ValueError, r"^ranks has range\(0, 0\)"),
        (lambda: Layout("x", 2, (((0, 1),),)), TypeError, r"^ranks has \(0, 1\); it must hold ranges"),  # type: ignore[arg-type]
        (lambda: Layout("x", 8, [[range(8)]]), TypeError, r"^ranks has .*; it must be a tuple with a tuple"),  # type: ignore[arg-type,list-item]
        (lambda: Layout("x", 8, ((range(8),),), [0, 8]), TypeError, r"^documents is \[0, 8\]; it must be"),  # type: ignore[arg-type]
        (lambda: Layout("x", 8, ((range(8),),), ()), ValueError, r"^documents is \(\); it must begin with 0"),
    ],
)
def test_what_is_no_layout_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_tensor_of_another_length_is_refused() -> None:
    layout = Layout.zigzag(8, 2)
    with pytest.raises(ValueError, match=r"^x has shape \(1, 7, 2\); dimension 1 must have 8 rows: this lay"):
        layout.shard(torch.zeros(1, 7, 2), 0)
    with pytest.raises(ValueError, match=r"^rank is 2; it must be an int from 0 to 1"):
        layout.shard(torch.zeros(1, 8, 2), 2)
    with pytest.raises(ValueError, match=r"^shards is 1 tensors; it must be 2 tensors"):
        layout.unshard([torch.zeros(1, 4, 2)])
    with pytest.raises(
        ValueError, match=r"^shards\[1\] has shape \(2, 4\) and shards\[0\] \(1, 4\); they must be"
    ):
        layout.unshard([torch.zeros(1, 4), torch.zeros(2, 4)])
    with pytest.raises(TypeError, match=r"^dim is 'rows'; it must be an int"):
        layout.shard(torch.zeros(1, 8), 0, "rows")  # type: ignore[arg-type]
