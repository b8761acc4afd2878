"""Bits of tiles that a mod's mask leaves empty or full, kept as long as what the mask depends on stays.

A kernel made of the mask's own expression finds them: 2 bits a tile, or a group of its rows, never an element
a score. They are found anew where sizes, numbers or captured tensors are others, or where a tensor has been
written to, as far as its version tells. That is what autograd goes by, too: who writes by ``.data`` or behind
PyTorch's back has to capture another tensor.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.call import Call
from flash_attention.layouts import Packed
from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.mods.mask_inputs import mask_inputs

KINDS_A_WORD = 16  # as in mod_arguments.cuh
LEAST_TILES = 64  # with fewer, finding them takes longer than what they save
MOST_UNUSED = 8  # times as many keys as a sequence has: packed tensors are looked at as if one had them all
KEPT = 64  # calls whose tiles are kept

Key = tuple[Any, ...]


class Tiles(NamedTuple):
    """Tiles of a launch.

    Attributes:
        words: int32, on the device.
        strides: in words, of a batch item, a head and a row of tiles.
        found: whether the words have been written, or will have been before the launch on its stream.
        key: by which they are kept for later launches; None: they are not.
        owners: whose memory the captured tensors are.
    """

    words: Tensor
    strides: tuple[int, int, int]
    found: bool
    key: Key | None
    owners: tuple[weakref.ref[Tensor], ...]

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As ``ModArguments.tiles`` has them."""
        return (self.words.data_ptr(), *self.strides)


_kept: OrderedDict[Key, Tiles] = OrderedDict()


def tiles_of(call: Call, kernel: Kernel, stream: int) -> Tiles | None:
    """Where the tiles of a call are, or are to be written; None: it does without.

    Args:
        call: the call, which has a mod.
        kernel: what is launched for it.
        stream: on which.
    """
    traced, problem = call.scores.traced, call.problem
    assert traced is not None
    seq_len_k = problem.seq_len_k
    if isinstance(call.layout, Packed):
        if call.k.shape[0] > MOST_UNUSED * seq_len_k:
            return None
        seq_len_k = call.k.shape[0]
    config = kernel.config
    n_rows, n_tiles = -(-problem.seq_len_q // config.B_r), -(-seq_len_k // config.B_c)
    if n_rows * n_tiles * config.mask_groups < LEAST_TILES:
        return None
    inputs = mask_inputs(traced.mod)
    n_heads = problem.n_heads if inputs.head else 1
    row = -(-n_tiles // tiles_a_word(config.mask_groups))
    strides = (n_heads * n_rows * row if inputs.batch else 0, n_rows * row if inputs.head else 0, row)
    n_words = (problem.batch if inputs.batch else 1) * n_heads * n_rows * row

    tensors = [traced.tensors[i] for i in inputs.tensors]
    key = _key(traced, tensors, kernel, (problem.seq_len_q, seq_len_k, strides, n_words), stream)
    known = None if key is None else _kept.pop(key, None)
    if known is not None and all(ref() is _owner(x) for ref, x in zip(known.owners, tensors, strict=True)):
        assert key is not None
        _kept[key] = known
        return known
    words = call.q.new_empty(n_words, dtype=torch.int32)
    return Tiles(words, strides, False, key, tuple(weakref.ref(_owner(x)) for x in tensors))


def keep(tiles: Tiles) -> None:
    """Keeps tiles for later launches, now that the launch that writes them has been queued."""
    if tiles.key is not None and not tiles.found:
        _kept[tiles.key] = tiles._replace(found=True)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)


def tiles_a_word(groups: int) -> int:
    """How many tiles have their bits in one word, where each has bits for some groups of rows."""
    return KINDS_A_WORD // (groups if groups <= 2 else 4)


def forget() -> None:
    """Finds all tiles anew from now on."""
    _kept.clear()


def _key(
    traced: Traced, tensors: list[Tensor], kernel: Kernel, sizes: tuple[Any, ...], stream: int
) -> Key | None:
    """What the tiles depend on beside the identity of tensors; None: they cannot be kept."""
    if torch.cuda.is_current_stream_capturing():  # the graph has memory of its own, and is run again later
        return None
    versions = []
    for x in tensors:
        if x.is_inference():  # has no version
            return None
        versions.append((id(_owner(x)), x._version, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype))
    inputs = mask_inputs(traced.mod)
    numbers = tuple(traced.numbers[i] for i in inputs.numbers)
    device = tensors[0].get_device() if tensors else torch.cuda.current_device()
    return (kernel, stream, device, sizes, numbers, tuple(versions))


def _owner(x: Tensor) -> Tensor:
    """The tensor that lives as long as the memory's versions count: of a view, the one that it is of."""
    return x if x._base is None else x._base
