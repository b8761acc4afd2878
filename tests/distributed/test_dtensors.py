"""DTensors in, DTensors out; one dimension of a mesh as the group; all rows on every rank by ``gather``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import error
from ranks import Raised, Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flash_attention
from flash_attention import distributed as cp
from flash_attention.distributed import Layout
from flash_helpers.test.reference import reference, reference_gradients

TOTAL, OPTIONS = 24, {"causal": True, "window": (9, 0)}


def whole() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, TOTAL, heads, 16).bfloat16() for heads in (4, 2, 2)]


# ---------------------------------------------------------------------- on a rank
def dtensors(names: tuple[str, ...], sizes: tuple[int, ...], sharded: dict[str, int]) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    placements = [Shard(sharded[name]) if name in sharded else Replicate() for name in names]
    q, k, v = (distribute_tensor(x, mesh, placements).requires_grad_() for x in whole())
    of_heads = [Shard(0) if sharded.get(name) == 2 else Replicate() for name in names]
    sinks = distribute_tensor(torch.arange(4.0), mesh, of_heads).requires_grad_()
    out, lse = cp.attention(q, k, v, sinks=sinks, return_lse=True, **OPTIONS)
    assert type(out) is type(q)
    assert out.placements == q.placements
    grads = torch.autograd.grad(out.sum(), [q, k, v, sinks])
    return [x.full_tensor().detach().float().numpy() for x in (out, lse, *grads)]


def one_dimension_of_a_mesh() -> Any:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    layout, rank = Layout.zigzag(TOTAL, mesh["cp"].size()), mesh.get_local_rank("cp")
    out = cp.attention(*(layout.shard(x, rank) for x in whole()), layout=layout, group=mesh["cp"], **OPTIONS)
    assert isinstance(out, Tensor)
    return cp.gather(out, layout, mesh["cp"]).float().numpy()


def gradient_of_gather() -> Any:
    layout, rank = Layout.striped(7, dist.get_world_size()), dist.get_rank()
    x = layout.shard(torch.arange(7.0).view(1, 7), rank).requires_grad_()
    rows = cp.gather(x, layout)
    (rows * torch.arange(1.0, 8.0)).sum().backward()
    assert x.grad is not None
    return rows.detach().numpy(), x.grad.numpy()


def refused(kind: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in whole())
    if kind == "mixed":
        return cp.attention(q, k.to_local(), v)
    if kind == "differ":
        return cp.attention(q, k.redistribute(mesh, [Replicate()]), v)
    if kind == "heads":
        return cp.attention(*(x.redistribute(mesh, [Shard(2)]) for x in (q, k, v)))
    if kind == "functions":
        whole_mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("tp", "cp"))
        split = [distribute_tensor(x, whole_mesh, [Shard(2), Shard(1)]) for x in whole()]
        return cp.attention(*split, mask_mod=lambda b, h, q, k: q >= k + h)
    if kind == "layout":
        return cp.attention(q, k, v, layout=Layout.explicit([[0], list(range(1, TOTAL))]), timeout=5)
    group = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    return cp.attention(*whole(), layout=Layout.zigzag(TOTAL, 2), group=group)


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize(
    ("ranks", "names", "sizes", "sharded"),
    [
        (2, ("cp",), (2,), {"cp": 1}),
        (3, ("cp",), (3,), {"cp": 1}),
        pytest.param(4, ("cp", "tp"), (2, 2), {"cp": 1, "tp": 2}, marks=pytest.mark.compile),
        pytest.param(4, ("dp", "cp"), (2, 2), {"dp": 0, "cp": 1}, marks=pytest.mark.compile),
    ],
    indirect=["ranks"],
)
def test_dtensors_give_dtensors(ranks: Ranks, names: Any, sizes: Any, sharded: Any) -> None:
    answers = ranks.run(dtensors, names, sizes, sharded)
    assert not any(isinstance(a, Raised) for a in answers), answers
    q, k, v = whole()
    sinks = torch.arange(4.0)
    out, lse = reference(q, k, v, sinks=sinks, **OPTIONS)
    grads = reference_gradients(q, k, v, torch.ones_like(q), sinks=sinks, **OPTIONS)
    single, single_lse = flash_attention.attention(q, k, v, sinks=sinks, return_lse=True, **OPTIONS)
    for answer in answers:
        found = [torch.from_numpy(x) for x in answer]
        assert error(found[0], out) <= 1.25 * error(single, out)
        assert error(found[1], lse) <= 1.25 * error(single_lse, lse) + 1e-6
        for x, y in zip(found[2:], grads, strict=True):
            assert y is not None
            assert error(x, y) < 0.004 * float(y.square().mean().sqrt())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_dimension_of_a_mesh_is_a_group(ranks: Ranks) -> None:
    answers = ranks.run(one_dimension_of_a_mesh)
    assert not any(isinstance(a, Raised) for a in answers), answers
    wanted = reference(*whole(), **OPTIONS)[0]
    assert error(torch.from_numpy(answers[0]), wanted) < 0.004
    assert np.array_equal(answers[0], answers[1])


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_gather_is_the_opposite_of_shard(ranks: Ranks) -> None:
    answers = ranks.run(gradient_of_gather)
    layout = Layout.striped(7, 3)
    for rank, (rows, grad) in enumerate(answers):
        assert rows.tolist() == [list(range(7))]
        assert grad[0].tolist() == (1 + layout.positions(rank)).tolist()


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mixed", "only q, v are DTensors; pass q, k and v as DTensors"),
        ("differ", "q, k and v must be on one mesh with equal placements: use redistribute"),
        ("heads", "on one dimension of the mesh it must be Shard(1), the sequence"),
        ("functions", "functions count batch items and heads of the whole"),
        ("layout", "since a DTensor is cut as torch.chunk cuts"),
        ("mesh", "group is a DeviceMesh of 2 dimensions ('dp', 'cp'); pass the one that splits"),
    ],
)
def test_what_can_not_be_meant_is_refused(ranks: Ranks, kind: str, message: str) -> None:
    answers = ranks.run(refused, kind)
    assert all(isinstance(a, Raised) and message in a.message for a in answers), answers
