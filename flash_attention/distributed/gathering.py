"""``gather``: all rows of a spread tensor on every rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flash_attention.checks.options import given
from flash_attention.distributed import agreement
from flash_attention.distributed.groups import Group, process_group
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.letting_go import let_go


@torch.compiler.disable
def gather(
    x: Tensor, layout: Layout, group: Group | None = None, dim: int = 1, *, timeout: float = 60.0
) -> Tensor:
    """All rows in the order of the sequence, on every rank; the opposite of ``Layout.shard``.

    All ranks of the group make the call together.

    The gradient of a rank's rows is that of its own copy: where every rank computes the same from the whole,
    it is not counted several times.

    Args:
        x: this rank's rows along ``dim``; else equally large on all ranks.
        layout: which rank holds which rows.
        group: as in ``attention``.
        dim: the dimension of the rows.
        timeout: as in ``attention``.

    Raises:
        TypeError, ValueError: a bad argument; the message says what is allowed.
        RanksDisagreeError: the ranks were asked for different things, or one of them refused its arguments.
        PeerLostError: a rank has ended, or did not answer in time.
    """
    processes, limit = process_group(group), agreement.TIMEOUT
    try:
        limit = agreement.checked_timeout(timeout)
        entries = _checked(x, layout, processes, dim)
    except Exception as error:
        agreement.refuse(processes, error, limit)
        raise
    agreement.agree(processes, entries, limit, always=x.device.type == "cpu")
    result: Tensor = _Gather.apply(x, layout, processes, dim, limit)  # type: ignore[no-untyped-call]
    return result


def _checked(x: object, layout: object, group: dist.ProcessGroup, dim: object) -> dict[str, str]:
    """What all ranks have to agree on."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {given(layout)}; it must be a Layout, that by which x was made")
    if isinstance(x, DTensor):
        raise TypeError("x is a DTensor; x.full_tensor() gives all of its rows")
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {given(x)}; it must be a tensor")
    if type(dim) is not int:
        raise TypeError(f"dim is {given(dim)}; it must be an int, the dimension of the rows")
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if layout.world != world:
        raise ValueError(f"layout has {layout.world} ranks and the group {world}; they must be equal")
    layout._check_rows("x", x, dim, layout.lengths[rank])
    sizes = ["rows" if i == dim % x.ndim else str(n) for i, n in enumerate(x.shape)]
    return {
        agreement.CALL: "gather",
        "the shape of x": ", ".join(sizes),
        "the type": str(x.dtype),
        "the device type": x.device.type,
        "layout": agreement.of_layout(layout),
    }


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int, limit: timedelta
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, dist.get_rank(group), dim
        most = max(layout.lengths)
        rows = x.movedim(dim, 0)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        every = [torch.empty_like(padded) for _ in range(layout.world)]
        with let_go((padded, *every)):
            try:
                work = dist.all_gather(every, padded, group=group, async_op=True)
                # With NCCL a time limit would make the host wait for the device; the group has its own.
                work.wait(limit) if x.device.type == "cpu" else work.wait()
            except (RuntimeError, dist.DistBackendError) as error:
                raise agreement.lost(group, limit, error) from error
        shards = [y[:length] for y, length in zip(every, layout.lengths, strict=True)]
        return layout.unshard(shards, 0).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.layout.shard(grads[0], ctx.rank, ctx.dim), None, None, None, None
