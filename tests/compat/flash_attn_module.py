"""Modules named ``flash_attn`` whose functions are this library's, for programs that import that package.

Beside the functions of ``flash_attention.compat.flash_attn`` there are the helpers that flash-attn's tests
import: packing of padded batches and the rotary embedding. They are written here, apart from the library,
whose results they judge.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor

from flash_attention import flash_attn_interface


def install() -> None:
    """Makes ``import flash_attn`` find this library, whether that package is installed or not."""
    functions = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}
    module_of("flash_attn", **functions)
    module_of(
        "flash_attn.flash_attn_interface",
        **functions,
        _get_block_size_n=_get_block_size_n,
        USE_TRITON_ROCM=False,  # of later releases
    )
    module_of("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input)
    module_of("flash_attn.layers")
    module_of("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)


def module_of(name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []  # type: ignore[attr-defined]  # a package: it has submodules
    sys.modules[name] = module


def _get_block_size_n(*unused: object) -> int:
    raise NotImplementedError("the block size is asked for only to undo dropout, which is refused")


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Padded x (batch, seq, …) as packed rows, by mask (batch, seq), nonzero where a token is.

    Returns:
        the rows (total, …), their flat places (total,), offsets (batch + 1,) int32, the longest length, and
        the lengths (batch,).
    """
    lengths = mask.sum(1, dtype=torch.int32)
    places = mask.flatten().nonzero().flatten()
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=x.device)
    offsets[1:] = lengths.cumsum(0)
    return x.flatten(0, 1)[places], places, offsets, int(lengths.max()), lengths


def pad_input(rows: Tensor, places: Tensor, batch: int, seq_len: int) -> Tensor:
    """The inverse of ``unpad_input``, (batch, seq_len, …) with zeros where no token is."""
    padded = rows.new_zeros((batch * seq_len, *rows.shape[1:]))
    padded[places] = rows
    return padded.unflatten(0, (batch, seq_len))


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """x (batch, seq, heads, d) with its first columns turned, as complex numbers in float64.

    Args:
        cos, sin: (positions, d_rotary / 2).
        interleaved: pairs are neighbouring columns; else column i and i + d_rotary / 2.
        seqlen_offsets: position of the first row, one or (batch,).
    """
    half = cos.shape[1]
    columns = torch.arange(2 * half, device=x.device)
    pairs = columns.view(half, 2) if interleaved else columns.view(2, half).T  # (half, 2)
    first = torch.as_tensor(seqlen_offsets, device=x.device).long().reshape(-1, 1)
    places = (first + torch.arange(x.shape[1], device=x.device)).expand(x.shape[0], -1)  # (batch, seq)
    turns = torch.complex(cos.double(), sin.double())[places][:, :, None]  # (batch, seq, 1, half)
    turned = torch.view_as_complex(x.double()[..., pairs].contiguous()) * turns
    result = x.clone()
    result[..., pairs.flatten()] = torch.view_as_real(turned).flatten(-2).to(x.dtype)
    return result
