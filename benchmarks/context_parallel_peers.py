"""Other context-parallel attentions, for ``context_parallel.py``: PyTorch's own, and ring-flash-attention's.

Each peer is a context manager that yields a call of this rank's rows, in the zigzag layout that all of them
use, with gradients of its inputs. A peer that can't run raises, on all ranks alike.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flash_attention
from flash_attention.backward_call import BackwardCall
from flash_attention.call import DENSE, Mask, Scores
from flash_attention.devices import backend, backward_backend
from flash_attention.distributed import Layout
from flash_attention.run.choices import choose
from flash_attention.run.plain_forms import mask_and_scores


class Shards(NamedTuple):
    """A rank's rows of one causal problem, and the call that a peer makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    rows_in: int  # the dimension of the rows


Peer = Callable[[Layout, int, Sequence[Tensor]], Any]


# ---------------------------------------------------------------------- PyTorch
@contextmanager
def _pytorch(
    layout: Layout, rank: int, whole: Sequence[Tensor], kernels: str, grouped: bool
) -> Iterator[Shards]:
    """``context_parallel`` over SDPA; with grouped heads, or with a key head for each of q."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = whole
    group = 1 if grouped else q.shape[2] // k.shape[2]
    buffers = [
        x.transpose(1, 2).contiguous()
        for x in (q, *(x.repeat_interleave(group, 2) for x in (k, v)), dout)
    ]  # fmt: skip
    mesh = init_device_mesh("cuda", (layout.world,), mesh_dim_names=("cp",))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    with (
        sdpa_kernel(getattr(SDPBackend, kernels)),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        yield Shards(buffers[0], buffers[1], buffers[2], buffers[3], call, 2)


# ---------------------------------------------------------------------- ring-flash-attention
def _of_pytorch() -> dict[str, Callable[..., Any]]:
    """flash-attn's two inner functions by the kernels of FlashAttention-2 that PyTorch has."""
    aten = torch.ops.aten

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
                window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
                return_softmax: bool) -> tuple[Any, ...]:  # fmt: skip
        out, lse, state, _, _ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, state

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
                 dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
                 window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
                 deterministic: bool, rng_state: None) -> None:  # fmt: skip
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        found = aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, state,
            scale=softmax_scale,
        )  # fmt: skip
        for into, x in zip((dq, dk, dv), found, strict=True):
            into.copy_(x)

    return {"_flash_attn_forward": forward, "_flash_attn_backward": backward}


def _of_this_library() -> dict[str, Callable[..., Any]]:
    """Likewise by the kernels of this library, so that the schemes alone are compared."""

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
                window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
                return_softmax: bool) -> tuple[Any, ...]:  # fmt: skip
        out, lse = flash_attention.attention(
            q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True
        )
        return out, lse, None, None

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
                 dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
                 window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
                 deterministic: bool, rng_state: None) -> None:  # fmt: skip
        mask, scores = mask_and_scores(
            Mask.of(causal, (None, None)), Scores(softmax_scale, 0.0, None), DENSE, q.shape[1], k.shape[1]
        )
        call = BackwardCall(
            q, k, v, out, softmax_lse, dout, None, dq, dk, dv, None, mask, scores,
            deterministic=deterministic,
        )  # fmt: skip
        of_device = backend(backward_backend(q.device.type))
        of_device.run_backward(call, choose(call.problem, q.device, None))

    return {"_flash_attn_forward": forward, "_flash_attn_backward": backward}


def _package(kernels: dict[str, Callable[..., Any]]) -> ModuleType:
    """ring-flash-attention's zigzag module, with other kernels for flash-attn's."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("ring_flash_attn", "flash_attn")]:
        del sys.modules[name]
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("ring_flash_attn is not installed: pip install --no-deps ring-flash-attn")
    # Its __init__ imports adapters of models, which are not needed here.
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(found.submodule_search_locations)
    inner = ModuleType("flash_attn.flash_attn_interface")
    inner.__dict__.update(kernels)
    sys.modules.update(
        {
            "ring_flash_attn": package,
            "flash_attn": ModuleType("flash_attn"),
            "flash_attn.flash_attn_interface": inner,
        }
    )
    return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")


@contextmanager
def _ring_flash_attention(
    layout: Layout, rank: int, whole: Sequence[Tensor], kernels: Callable[[], dict[str, Callable[..., Any]]]
) -> Iterator[Shards]:
    """``zigzag_ring_flash_attn_func`` of the package ring-flash-attn."""
    function = _package(kernels()).zigzag_ring_flash_attn_func
    q, k, v, dout = (layout.shard(x, rank) for x in whole)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, causal=True, group=dist.group.WORLD)
        return out

    yield Shards(q, k, v, dout, call, 1)


def _make(function: Callable[..., Any], *options: Any) -> Peer:
    return lambda layout, rank, whole: function(layout, rank, whole, *options)


PEERS: dict[str, Peer] = {
    "ring-flash-attention, kernels of this library": _make(_ring_flash_attention, _of_this_library),
    "ring-flash-attention, PyTorch's FlashAttention-2": _make(_ring_flash_attention, _of_pytorch),
    "PyTorch context_parallel, cuDNN, heads repeated": _make(_pytorch, "CUDNN_ATTENTION", False),
    "PyTorch context_parallel, FlashAttention-2, heads repeated": _make(_pytorch, "FLASH_ATTENTION", False),
    "PyTorch context_parallel, cuDNN, heads grouped": _make(_pytorch, "CUDNN_ATTENTION", True),
}
"""By name, how each begins; the order in which they are timed."""
