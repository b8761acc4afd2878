"""One tile by the library's own attention: output with LSE, and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.backends import cpu, cpu_backward
from flash_attention.backends.cpu_backward import Gradients
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backward_call import BackwardCall
from flash_attention.call import DENSE, Mask, Scores
from flash_attention.checks.calls import DTYPES
from flash_attention.devices import backend, backward_backend
from flash_attention.distributed.functions import Functions
from flash_attention.distributed.tiles import Tile
from flash_attention.errors import NoKernelError
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_attention.run.choices import choose
from flash_attention.run.cpu_choice import CPU_B_C
from flash_attention.run.passes import forward_pass
from flash_attention.run.plain_forms import mask_and_scores
from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.dtype import DType

# Of the configuration the CPU backend asks for the keys of a step alone.
_ON_CPU = FlashForwardKernelConfig(DType.BF16, 128, 64, CPU_B_C, 4, False, False, False, 0, 0, 0, False, True)


@dataclass(frozen=True)
class Arithmetic:
    """What becomes of a product of a query and a key, and how kernels are to run.

    Attributes:
        scale: factor of the products.
        softcap: 0: none.
        deterministic: gradients of equal calls have equal bits.
        n_sms: streaming multiprocessors that kernels may fill while messages travel; None: all.
        functions: the user's, of scores and masks; None: there are none.
    """

    scale: float
    softcap: float = 0.0
    deterministic: bool = True
    n_sms: int | None = None
    functions: Functions | None = None

    def of_heads(self, first: int) -> Arithmetic:
        """The same where the first query head of the tensors is another one of the call."""
        if self.functions is None:
            return self
        return replace(self, functions=replace(self.functions, first_head=first))

    def traced(self, tile: Tile) -> Traced | None:
        """What the functions do to a tile; None: there are none."""
        return None if self.functions is None else self.functions.at(tile)


def limits_of(tile: Tile) -> tuple[int | None, int | None]:
    """The band of a tile as (left, right) around the place i + keys - queries of query i."""
    aligned = len(tile.k) - len(tile.q)
    left = None if tile.low is None else aligned - tile.low
    right = None if tile.high is None else tile.high - aligned
    return left, right


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    arithmetic: Arithmetic,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of a tile.

    Args:
        q: the queries of the tile, (batch, queries, heads, d).
        k: its keys, (batch, keys, kv heads, d).
        v: (batch, keys, kv heads, d_v).
        tile: which keys a query sees.
        arithmetic: see there.
        out: (batch, queries, heads, d_v), of the type of q or float32, is written; None: a new one, float32.
        sinks: (heads,) one more logit a head without a value; None: there are none.

    Returns:
        out, and lse (batch, heads, queries), float32.
    """
    window = left, right = limits_of(tile)
    scale, softcap = arithmetic.scale, arithmetic.softcap
    traced = arithmetic.traced(tile)
    if q.dtype in DTYPES:
        tensors = (q.detach(), k.detach(), v.detach())
        options = Options(
            softmax_scale=scale, window=window, softcap=softcap, sinks=sinks, return_lse=True, out=out,
            out_dtype=None if out is not None and out.dtype is q.dtype else torch.float32,
        )  # fmt: skip
        if arithmetic.n_sms is not None:
            # Not every kernel keeps to a number of SMs; messages and tiles then share all of them.
            with contextlib.suppress(NoKernelError):
                return _attention(tensors, options._replace(n_sms=arithmetic.n_sms), traced)
        return _attention(tensors, options, traced)
    # float32, of which the public function knows nothing: the CPU backend computes it all the same.
    if out is None:
        out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]))
    cpu.attention(
        _ON_CPU, q, k, v, out, lse, scale,
        left=left, right=right, softcap=softcap, sinks=sinks, mods=_block_mods(traced, q, k),
    )  # fmt: skip
    return out, lse


def _attention(
    tensors: tuple[Tensor, Tensor, Tensor], options: Options, traced: Traced | None
) -> tuple[Tensor, Tensor]:
    """As the public function, which a call without functions takes, since it remembers calls."""
    if traced is None:
        keywords = {
            name: x for name, x in options._asdict().items() if x is not Options._field_defaults[name]
        }
        found: tuple[Tensor, Tensor] = attention(*tensors, **keywords)
        return found
    out, lse = forward_pass(*tensors, DENSE, options, traced=traced)
    assert lse is not None  # it was asked for
    return out, lse


def _block_mods(traced: Traced | None, q: Tensor, k: Tensor) -> BlockMods | None:
    """The functions for the CPU backend."""
    if traced is None:
        return None
    return BlockMods(traced, range(q.shape[0]), range(q.shape[2]), q.shape[2] // max(1, k.shape[2]))


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    tile: Tile,
    arithmetic: Arithmetic,
    dq: Tensor | None = None,
    dkv: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's share of the gradients dq, dk and dv; of the type that ``gradient_type`` says.

    Args:
        dout, out, lse, dlse: of the tile's queries over all their keys, so that the shares of all tiles add
            up to the gradients.
        q, k, v, tile, arithmetic: as in ``attend``.
        dq: is written with the share of q; None: a new one, to which others are added.
        dkv: likewise those of k and v.
    """
    left, right = limits_of(tile)
    scale, softcap = arithmetic.scale, arithmetic.softcap
    traced = arithmetic.traced(tile)
    dkv = dkv or [torch.empty(x.shape, dtype=key_gradient_type(x), device=x.device) for x in (k, v)]
    dk, dv = dkv
    if dq is None:
        dq = torch.empty(q.shape, dtype=gradient_type(q, False), device=q.device)
    if not dout.numel():  # no heads, of which nothing is to be computed
        for x in (dq, dk, dv):
            x.zero_()
        return dq, dk, dv
    if q.dtype not in DTYPES:
        # float32, of which the public function knows nothing: the CPU backend computes it all the same.
        cpu_backward.backward(
            _ON_CPU, dout, q, k, v, out, lse, dlse, scale, Gradients(dq, dk, dv),
            left=left, right=right, softcap=softcap, mods=_block_mods(traced, q, k),
        )  # fmt: skip
        return dq, dk, dv
    mask, scores = Mask(left, right), Scores(scale, softcap, None, traced)
    mask, scores = mask_and_scores(mask, scores, DENSE, q.shape[1], k.shape[1])
    call = BackwardCall(
        q, k, v, out, lse, dout, dlse, dq, dk, dv, None, mask, scores,
        deterministic=arithmetic.deterministic,
    )  # fmt: skip
    of_device = backend(backward_backend(q.device.type))
    of_device.run_backward(call, choose(call.problem, q.device, None))
    return dq, dk, dv


def gradient_type(q: Tensor, whole: bool) -> torch.dtype:
    """The type of a tile's share of the gradient of q: float32, which kernels write unrounded.

    Where a share is the ``whole`` gradient, kernels round it to the type of q.
    """
    return q.dtype if whole and q.is_cuda else torch.float32


def key_gradient_type(k: Tensor) -> torch.dtype:
    """Likewise of a tile's shares of the gradients of keys."""
    return torch.float32
