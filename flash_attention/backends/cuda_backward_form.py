"""Tensors of a backward call brought into the form that a kernel takes: padded, aligned, packed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attention.backends.captured_sums import CapturedSums
from flash_attention.backends.cuda_form import address, cap_of_mod, window_side
from flash_attention.backends.cuda_tiles import KINDS_A_WORD, LEAST_TILES
from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.backward_call import BackwardCall
from flash_attention.checks.memory import ALIGNMENT, misalignment
from flash_attention.checks.tma import stride_obstacle
from flash_attention.layouts import Cached, Packed
from flash_attention.mods.arguments import mod_arguments
from flash_helpers.kernels.arguments import BackwardArguments, ModArguments
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.mods.mask_inputs import MASK, mask_inputs, needs_bits
from flash_helpers.mods.mod import Mod

FOUND_ROWS = FOUND_KEYS = 64  # of a tile of which bits tell (trimmed_tiles.cuh)

Strides = tuple[int, ...]
NO_STRIDES: Strides = (0, 0, 0, 1)


class TileRoom(NamedTuple):
    """Of bits of tiles.

    Attributes:
        n_bytes: how much they take.
        strides: in words, of a batch item, a head and a row of tiles.
    """

    n_bytes: int
    strides: tuple[int, int, int]


class Form(NamedTuple):
    """What a launch takes, and what has to live until it was queued.

    Attributes:
        arguments: the launch's.
        lse: contiguous, as the arguments have its address.
        copied: (gradient, what is written in its place, with as many columns or more).
        kept: tensors of which the arguments have addresses.
        mod: what the kernel's mod captured, or None.
        tiles: room for the bits of the mask's tiles that the launch finds; None: bounds tell of them.
        sums: where it gathers the gradients of captured tensors, or None.
    """

    arguments: BackwardArguments
    lse: Tensor
    copied: list[tuple[Tensor, Tensor]]
    kept: tuple[Tensor | None, ...]
    mod: ModArguments | None = None
    tiles: TileRoom | None = None
    sums: CapturedSums | None = None


def prepared(call: BackwardCall, kernel: Kernel) -> Form:
    """The tensors of a call, none of which is empty, in the form that a kernel takes."""
    scale, softcap, _, traced = call.scores
    d_head, d_head_v = kernel.config.d_head, kernel.config.d_head_v
    if kernel.traits.padded_head:
        d_head, d_head_v = call.q.shape[-1], call.v.shape[-1]
    q, k = _fitted(call.q, d_head), _fitted(call.k, d_head)
    # A float32 output is rounded for the kernel, as the others are.
    v, out, dout = (_fitted(x.to(q.dtype), d_head_v) for x in (call.v, call.out, call.dout))
    copied: list[tuple[Tensor, Tensor]] = []
    dq, dk = (_target(x, d_head, copied) for x in (call.dq, call.dk))
    dv = _target(call.dv, d_head_v, copied)
    lse = call.lse if call.lse.is_contiguous() else call.lse.contiguous()
    dlse = None if call.dlse is None else call.dlse.float().contiguous()

    layout, problem = call.layout, call.problem
    packed = layout if isinstance(layout, Packed) else None
    cache = layout if isinstance(layout, Cached) else None
    batch, seq_len_q, seq_len_k = problem.batch, problem.seq_len_q, problem.seq_len_k
    if packed is not None:
        seq_len_q, seq_len_k = min(seq_len_q, q.shape[0]), min(seq_len_k, k.shape[0])
    # By position: names take as long as all of the binding's work.
    arguments = BackwardArguments(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        dout.data_ptr(),
        lse.data_ptr(),
        address(dlse),
        address(dq),
        address(dk),
        address(dv),
        _strides(q),
        _strides(k),
        _strides(v),
        _strides(out),
        _strides(dout),
        _strides(dq),
        _strides(dk),
        _strides(dv),
        batch,
        problem.n_heads,
        problem.n_heads_kv,
        seq_len_q,
        seq_len_k,
        d_head,
        d_head_v,
        scale,
        window_side(problem.left),
        window_side(problem.right),
        softcap,
        0 if packed is None else packed.cu_seqlens_q.data_ptr(),
        0 if packed is None else packed.cu_seqlens_k.data_ptr(),
        0,  # every query counts
        0 if cache is None else cache.seqused_k.data_ptr(),
        0 if packed is None else q.shape[0],
        0 if packed is None else k.shape[0],
    )
    mod = sums = tiles = None
    if problem.has_mod:
        assert kernel.mod is not None
        sums = None if traced is None else CapturedSums.of(kernel.mod, traced.tensors)
        own = () if sums is None else sums.tensors()
        mod = mod_arguments(traced, *cap_of_mod(softcap), dropout=call.dropout, sums=own)
        tiles = _room_for_tiles(kernel.mod, call)
    return Form(arguments, lse, copied, (q, k, v, out, dout, dlse, dq, dk, dv), mod, tiles, sums)


def _room_for_tiles(mod: Mod, call: BackwardCall) -> TileRoom | None:
    if mod.result(MASK) is None or not needs_bits(mod):
        return None
    problem, inputs = call.problem, mask_inputs(mod)
    n_rows, n_tiles = -(-problem.seq_len_q // FOUND_ROWS), -(-problem.seq_len_k // FOUND_KEYS)
    if n_rows * n_tiles < LEAST_TILES:
        return None
    row = -(-n_tiles // KINDS_A_WORD)
    n_heads = problem.n_heads if inputs.head else 1
    head, batch = n_rows * row if inputs.head else 0, n_heads * n_rows * row if inputs.batch else 0
    n_words = (problem.batch if inputs.batch else 1) * n_heads * n_rows * row
    return TileRoom(4 * n_words, (batch, head, row))


def _fitted(x: Tensor, d_head: int) -> Tensor:
    """An input with rows of this length, which a kernel can read; x itself where it can be."""
    if x.shape[-1] != d_head:
        return pad(x, (0, d_head - x.shape[-1]))
    return x if _is_reached(x) else x.clone(memory_format=torch.contiguous_format)


def _is_reached(x: Tensor) -> bool:
    """Whether every kernel reads and writes the rows of x where they are."""
    if x.is_contiguous():  # then rows are of whole chunks, for head sizes are multiples of 8
        return x.data_ptr() % ALIGNMENT == 0
    return x.stride(-1) == 1 and not misalignment(x) and not stride_obstacle(x=x)


def _target(gradient: Tensor | None, d_head: int, copied: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """What a kernel writes for a gradient; another tensor than it is added to ``copied``."""
    if gradient is None:
        return None
    if gradient.shape[-1] == d_head and _is_reached(gradient):
        return gradient
    written = gradient.new_empty((*gradient.shape[:-1], d_head))
    copied.append((gradient, written))
    return written


def _strides(x: Tensor | None) -> Strides:
    """(batch, seq, head, element). Offsets say where packed sequences begin: no batch stride is used."""
    if x is None:
        return NO_STRIDES
    return x.stride() if x.ndim == 4 else (0, *x.stride())


def empty_gradients(call: BackwardCall) -> None:
    """Writes the gradients of a call without queries or without keys: only sinks can have one."""
    for gradient in (call.dq, call.dk, call.dv, *call.dcaptured.values()):
        if gradient is not None:
            gradient.zero_()
    if call.dsinks is not None and call.scores.sinks is not None:
        delta = torch.zeros_like(call.lse) if call.dlse is None else -call.dlse.float()
        call.dsinks.copy_(sink_gradient(call.scores.sinks, call.lse, delta))
