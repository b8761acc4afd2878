"""``gather``: all rows of a spread tensor on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attention.distributed.groups import Group, process_group
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.letting_go import let_go


def gather(x: Tensor, layout: Layout, group: Group | None = None, dim: int = 1) -> Tensor:
    """All rows in the order of the sequence, on every rank; the opposite of ``Layout.shard``.

    The gradient of a rank's rows is that of its own copy: where every rank computes the same from the whole,
    it is not counted several times.

    Args:
        x: this rank's rows along ``dim``; else equally large on all ranks.
        layout: which rank holds which rows.
        group: as in ``attention``.
        dim: the dimension of the rows.
    """
    processes = process_group(group)
    if layout.world != dist.get_world_size(processes):
        raise ValueError(
            f"layout has {layout.world} ranks and the group {dist.get_world_size(processes)}; they must be "
            "equal"
        )
    layout._check_rows("x", x, dim, layout.lengths[dist.get_rank(processes)])
    result: Tensor = _Gather.apply(x, layout, processes, dim)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, dist.get_rank(group), dim
        most = max(layout.lengths)
        rows = x.movedim(dim, 0)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        every = [torch.empty_like(padded) for _ in range(layout.world)]
        with let_go((padded, *every)):
            dist.all_gather(every, padded, group=group)
        shards = [y[:length] for y, length in zip(every, layout.lengths, strict=True)]
        return layout.unshard(shards, 0).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.layout.shard(grads[0], ctx.rank, ctx.dim), None, None, None
