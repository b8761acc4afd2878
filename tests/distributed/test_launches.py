"""What a rank's program launches beside its tiles: each is a kernel on a GPU, and its bytes are time.

Tiles are left out and nothing travels. Counted are PyTorch's operators that touch numbers, and what they read
and write, as multiples of the bytes of the rank's own keys and values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attention.call import Mask
from flash_attention.distributed import Layout, pairs
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.function import ContextParallel
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import Heads, Schedule

ROWS, D = 16384, 128
HEADS = Heads(32, 8)
LAUNCHES = ("copy_", "clone", "_to_copy", "zero_", "fill_", "add", "add_", "cat")


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in LAUNCHES:
            self.launches += 1
            seen = [x for x in (*args, *(kwargs or {}).values(), result) if isinstance(x, Tensor)]
            self.bytes += sum({id(x): x.nbytes for x in seen}.values())
        return result


class Nothing:
    """A transport by which nothing travels."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start(self, *_: Any) -> Nothing:
        return self

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles whose results are memory, of the types that kernels write."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out = rest[2] if len(rest) > 2 and rest[2] is not None else None
        if out is None:
            out = torch.empty(*q.shape[:3], v.shape[3])
        return out, torch.empty(q.shape[0], q.shape[2], q.shape[1])

    def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        dq, dkv = rest[5:7]
        made = dkv or [torch.empty(x.shape, dtype=pairs.key_gradient_type(x)) for x in (k, v)]
        return (torch.empty(q.shape) if dq is None else dq, *made)

    monkeypatch.setattr(pairs, "attend", attend)
    monkeypatch.setattr(pairs, "gradients", gradients)
    monkeypatch.setattr(pairs, "gradient_type", lambda q, whole: q.dtype if whole else torch.float32)


def counted(method: str, window: int | None, rank: int) -> list[tuple[int, float]]:
    """Launches and multiples of bytes, of the forward and the backward pass of one of two ranks."""
    layout = Layout.zigzag(ROWS, 2)
    mask = Mask.of(True, (window, 0) if window else (None, None))
    schedule = Schedule(method, layout, mask, HEADS)  # type: ignore[arg-type]
    transport: Any = Nothing(rank)
    plan = Plan(schedule, transport, Arithmetic(1.0), Arithmetic(1.0))
    q, k, v = (
        torch.empty(1, layout.lengths[rank], n, D, dtype=torch.bfloat16).requires_grad_()
        for n in (HEADS.q, HEADS.kv, HEADS.kv)
    )
    found = []
    with Counting() as forward:
        out, _ = ContextParallel.apply(plan, q, k, v, None)  # type: ignore[no-untyped-call]
    with Counting() as backward:
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    for count in (forward, backward):
        found.append((count.launches, count.bytes / (k.nbytes + v.nbytes)))
    return found


@pytest.mark.parametrize(
    ("method", "window", "rank", "limits"),
    [
        # Keys to the others and into the block, read and written; back come float32 gradients.
        ("all_gather", None, 0, [(15, 3.1), (28, 13.1)]),
        ("all_gather", None, 1, [(10, 4.1), (16, 11.1)]),
        ("all_gather", 4096, 0, [(4, 1.1), (8, 7.1)]),
        ("all_gather", 4096, 1, [(4, 1.1), (8, 8.1)]),
        # Beside merges, which PyTorch does by other operators.
        ("ring", None, 0, [(6, 6.2), (10, 18.1)]),
        ("ring", None, 1, [(4, 8.3), (5, 17.1)]),
    ],
)
def test_what_is_launched_beside_tiles(
    method: str, window: int | None, rank: int, limits: list[tuple[int, float]]
) -> None:
    for (launches, multiple), (most, most_bytes) in zip(counted(method, window, rank), limits, strict=True):
        assert launches <= most
        assert multiple <= most_bytes
