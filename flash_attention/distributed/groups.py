"""The group of a call: a ProcessGroup, one dimension of a DeviceMesh, or that of DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flash_attention.checks.options import given
from flash_attention.distributed.layout import Layout

Group = dist.ProcessGroup | DeviceMesh


def process_group(group: Group | None) -> dist.ProcessGroup:
    """The process group that is meant; None: the default one.

    Raises:
        RuntimeError: torch.distributed is not started.
        TypeError: it is neither a group nor a mesh.
        ValueError: a mesh of several dimensions, or a group that this process is not in.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not started, and ranks find each other by it: call "
            "torch.distributed.init_process_group(…) and start the program with torchrun"
        )
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {tuple(names)}; pass the one that splits "
                f"the sequence, e.g. mesh[{names[-1] if names else 'name'!r}]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in the group; call attention on the ranks of the group alone"
            )
        raise TypeError(
            f"group is {given(group)}; it must be a ProcessGroup, one dimension of a DeviceMesh, or None for "
            "the default group"
        )
    return group


def group_of(tensors: Iterable[object], group: Group | None) -> dist.ProcessGroup | None:
    """The group of a call: that which is given, else that of its DTensors, else the default one.

    None: DTensors are there, and none is split along its sequence. ``spread_of`` refuses these.

    Raises:
        as ``process_group`` does.
    """
    spread = [x for x in tensors if isinstance(x, DTensor)] if group is None else []
    if not spread:
        return process_group(group)
    for x in spread:
        dims = [i for i, p in enumerate(x.placements) if p == Shard(1)]
        if len(dims) == 1:
            return x.device_mesh.get_group(dims[0])
    return None


class Spread(NamedTuple):
    """How DTensors are spread.

    Attributes:
        mesh: their mesh.
        placements: on each of its dimensions.
        dim: the dimension of the mesh that splits the sequence.
        total: rows of the whole sequence.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    dim: int
    total: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.dim)

    def layout(self) -> Layout:
        """The layout that a DTensor has: parts as ``torch.chunk`` makes them."""
        return Layout.contiguous(self.total, self.mesh.size(self.dim))

    def check(self, layout: Layout) -> None:
        """ValueError: the shards have other lengths than this layout."""
        own = self.layout()
        if layout.lengths != own.lengths:
            raise ValueError(
                f"layout ({layout.name}) has {layout.lengths} rows on its ranks, and the DTensors' shards "
                f"have {own.lengths}, since a DTensor is cut as torch.chunk cuts; take a length that "
                f"{2 * layout.world} divides, or pass the local tensors"
            )

    def check_functions(self) -> None:
        """NotImplementedError: batch items or heads are spread, which functions of the user's count."""
        others = [p for i, p in enumerate(self.placements) if i != self.dim]
        if any(p != Replicate() for p in others):
            raise NotImplementedError(
                f"score_mod or mask_mod is given, and q is spread as {self.placements}: functions count "
                "batch items and heads of the whole, and this rank has some; pass local tensors with a "
                "layout, and functions that count what they hold"
            )


def spread_of(q: object, k: object, v: object) -> Spread | None:
    """How q, k and v are spread; None: they are no DTensors.

    Raises:
        TypeError: some are, some are not.
        ValueError: they are spread in different ways, or their sequence is on no dimension of the mesh, or on
            several.
    """
    tensors = {"q": q, "k": k, "v": v}
    kinds = {name: isinstance(x, DTensor) for name, x in tensors.items()}
    if not any(kinds.values()):
        return None
    if not all(kinds.values()):
        which = ", ".join(name for name, is_one in kinds.items() if is_one)
        raise TypeError(
            f"only {which} are DTensors; pass q, k and v as DTensors, or the local tensor of each"
        )
    assert isinstance(q, DTensor)
    for name, x in tensors.items():
        assert isinstance(x, DTensor)
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(
                f"{name} is spread as {x.placements} and q as {q.placements}; q, k and v must be on one mesh "
                "with equal placements: use redistribute"
            )
    dims = [i for i, p in enumerate(q.placements) if p == Shard(1)]
    if len(dims) != 1 or not all(p == Replicate() or type(p) is Shard for p in q.placements):
        raise ValueError(
            f"q is spread as {q.placements}; on one dimension of the mesh it must be Shard(1), the sequence, "
            "and on the others Shard(0), Shard(2) or Replicate(): use redistribute"
        )
    return Spread(q.device_mesh, tuple(q.placements), dims[0], q.shape[1])


def local_sinks(sinks: Tensor | None, spread: Spread | None) -> Tensor | None:
    """The sinks of this rank's heads; gradients of a DTensor are summed over the ranks that share it.

    Raises:
        ValueError: a DTensor that is not replicated over the group, or not split as the heads are.
    """
    if not isinstance(sinks, DTensor):
        return sinks
    if spread is None or sinks.device_mesh != spread.mesh:
        if all(p == Replicate() for p in sinks.placements):
            return sinks.to_local(grad_placements=[Partial()] * len(sinks.placements))
        raise ValueError(
            f"sinks is a DTensor spread as {sinks.placements}; with local q, k and v it must be Replicate()"
        )
    wanted = tuple(Shard(0) if p == Shard(2) else Replicate() for p in spread.placements)
    if tuple(sinks.placements) != wanted:
        raise ValueError(
            f"sinks is spread as {sinks.placements}; with q spread as {spread.placements} it must be {wanted}"
        )
    # Ranks that hold different rows have different shares of the gradient.
    grads = [
        w if w == Shard(0) else Replicate() if p == Replicate() else Partial()
        for w, p in zip(wanted, spread.placements, strict=True)
    ]
    return sinks.to_local(grad_placements=grads)


def as_dtensor(x: Tensor, spread: Spread, shape: tuple[int, ...], axes: tuple[int, int, int]) -> Tensor:
    """A local result as a DTensor.

    Args:
        shape: of the whole.
        axes: where batch, rows and heads lie in it.
    """
    places = {0: axes[0], 1: axes[1], 2: axes[2]}
    placements = [Shard(places[p.dim]) if isinstance(p, Shard) else p for p in spread.placements]
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        x, spread.mesh, placements, run_check=False, shape=torch.Size(shape), stride=whole.stride()
    )
