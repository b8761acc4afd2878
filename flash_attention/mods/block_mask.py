"""``BlockMask`` objects of ``torch.nn.attention.flex_attention`` as mask functions.

Such an object lists blocks of queries and keys: those that are seen in full, and those in which its
``mask_mod`` says which pairs are. What is not listed is hidden. Where the lists turn out to say what
``mask_mod`` says, ``mask_mod`` alone is used; else the lists are, too, as a map of the blocks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.mods.dense import element
from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.remembered import recorded
from flash_attention.mods.tracing import Traced
from flash_helpers.messages import named_type
from flash_helpers.mods.tiles import Tile, Tiling, tiles

MaskMod = Callable[..., Any]


class _Size(NamedTuple):
    """Of a block."""

    q: int
    k: int


FLEX = "torch.nn.attention.flex_attention"
MOST_PAIRS = {"cpu": 2**24, "cuda": 2**29}  # looked at to find out whether the lists are needed
# Of each object: what it was read from, and its map of blocks with the axes, or None.
_maps: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[Tensor, tuple[int, ...]] | None, list[Tensor]]]
_maps = weakref.WeakKeyDictionary()


def is_block_mask(x: object) -> bool:
    """Whether x is a ``BlockMask``. PyTorch's module is not imported for the question."""
    module = sys.modules.get(FLEX)
    return module is not None and isinstance(x, module.BlockMask)


def check_block_mask(block_mask: Any, batch: int, n_heads: int, seq_len_q: int, seq_len_k: int) -> None:
    """Refuses one that was made for another call.

    Raises:
        ValueError: lengths, batch or heads do not fit.
    """
    if tuple(block_mask.seq_lengths) != (seq_len_q, seq_len_k):
        was_q, was_k = block_mask.seq_lengths
        raise ValueError(
            f"the BlockMask was made for {was_q} queries and {was_k} keys; q and k have {seq_len_q} and "
            f"{seq_len_k}: make one for these, or pass its mask_mod, which has no lengths"
        )
    for name, has, size in zip(
        ("batch", "n_heads"), block_mask.kv_num_blocks.shape, (batch, n_heads), strict=False
    ):
        if has not in (1, size):
            raise ValueError(
                f"the BlockMask was made with {name} {has}, and the call has {size}: make it with {size}, or "
                "with None where it does not depend on it"
            )


def mask_of_blocks(block_mask: Any) -> MaskMod:
    """What a ``BlockMask`` lets a query see, as a ``mask_mod``: its own, or one that reads its lists, too.

    ``attention`` takes the object itself; ``trace`` of this function shows what is used then.

    Args:
        block_mask: the object. What its lists say is found out once, which waits for their device, and
            again where lists, function or what it captured have changed.

    Raises:
        TypeError: it is another object.
    """
    if not is_block_mask(block_mask):
        raise TypeError(
            f"block_mask is {named_type(block_mask)}; it must be a BlockMask of {FLEX}. A function is a "
            "mask_mod itself, and dense_mask(mask) makes one of a tensor of bools"
        )
    mask_mod = block_mask.mask_mod
    traced = recorded(None, mask_mod, block_mask.kv_indices.device)
    lists = [x for pair in _lists(block_mask) for x in pair]
    held = [*lists, *traced.tensors]  # kept, so that no other tensor gets the place of one
    if any(x.is_inference() for x in held):  # nothing tells of changes
        return mask_of_lists(block_mask)
    said = (
        mask_mod, block_mask.seq_lengths, block_mask.BLOCK_SIZE, traced.mod, traced.numbers,
        [(x._version, x.data_ptr()) for x in held],
    )  # fmt: skip
    known = _maps.get(block_mask)
    if known is None or known[0] != said or not _are_the_same(known[2], held):
        blocks = blocks_of(block_mask)
        found = None if _says_the_same(block_mask, traced, blocks) else _map_of(blocks)
        known = _maps[block_mask] = (said, found, held)
    if known[1] is None:
        return mask_mod  # type: ignore[no-any-return]
    return _in_blocks(block_mask, *known[1])


def mask_of_lists(block_mask: Any) -> MaskMod:
    """The same by its lists, without looking whether they are needed: whoever compiles a program cannot."""
    return _in_blocks(block_mask, *_map_of(blocks_of(block_mask)))


def _in_blocks(block_mask: Any, table: Tensor, axes: tuple[int, ...]) -> MaskMod:
    """What is seen by a map of the blocks, and in those that are partial by ``mask_mod``, too."""
    mask_mod = block_mask.mask_mod
    size_q, size_k = block_mask.BLOCK_SIZE
    # Numbers within an object are part of the mod: a division by 128 is a shift then.
    size = _Size(int(size_q), int(size_k))
    of_lists_alone = mask_mod is sys.modules[FLEX].noop_mask

    def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = element(table, axes, (b, h, q_idx // size.q, kv_idx // size.k))
        if of_lists_alone:
            return kind != int(Tile.EMPTY)
        return (kind == int(Tile.FULL)) | (kind == int(Tile.PARTIAL)) & mask_mod(b, h, q_idx, kv_idx)

    return in_blocks


def _are_the_same(known: list[Tensor], held: list[Tensor]) -> bool:
    return len(known) == len(held) and all(x is y for x, y in zip(known, held, strict=True))


def blocks_of(block_mask: Any) -> Tensor:
    """The ``Tile`` of each block as the lists say it, (batch|1, n_heads|1, rows, columns) uint8."""
    seq_len_k, size_k = block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]
    columns = -(-seq_len_k // size_k)
    counts = block_mask.kv_num_blocks
    found = torch.zeros((*counts.shape, columns + 1), dtype=torch.uint8, device=counts.device)
    for kind, (n, indices) in zip((Tile.PARTIAL, Tile.FULL), _lists(block_mask), strict=False):
        listed = torch.arange(indices.shape[-1], device=n.device) < n[..., None]
        # What is behind the end of a list goes to one more column.
        places = torch.where(listed, indices, columns).long()
        found.scatter_(-1, places, int(kind))
    return found[..., :columns]


def _lists(block_mask: Any) -> list[tuple[Tensor, Tensor]]:
    """Numbers and places of the blocks that ``mask_mod`` divides, and of those that are full, if any."""
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    return lists


def _says_the_same(block_mask: Any, traced: Traced, blocks: Tensor) -> bool:
    """Whether ``mask_mod`` hides all of each block that is not listed, and nothing of those that are full.

    Bounds tell it of affine masks; of others the pairs, as long as they are not too many to look at.
    """
    tiling = Tiling(*block_mask.seq_lengths, *block_mask.BLOCK_SIZE)
    by_bounds = torch.from_numpy(tiles(traced.mod, tiling, traced.numbers)).to(blocks.device)
    if blocks.shape[-2:] != by_bounds.shape:
        return False
    open_to_doubt = (blocks == Tile.EMPTY) & (by_bounds != Tile.EMPTY)
    open_to_doubt |= (blocks == Tile.FULL) & (by_bounds != Tile.FULL)
    if not bool(open_to_doubt.any()):
        return True
    for name, n in zip(("b", "h"), blocks.shape, strict=False):
        if n == 1 and traced.mod.uses(name):
            return False  # how many there are is not known here
    pairs = blocks.shape[0] * blocks.shape[1] * tiling.seq_len_q * tiling.seq_len_k
    if pairs > MOST_PAIRS.get(blocks.device.type, 0) or any(
        x.device != blocks.device for x in traced.tensors
    ):
        return False
    return not bool((_by_pairs(traced, tiling, blocks) & open_to_doubt).any())


def _by_pairs(traced: Traced, tiling: Tiling, blocks: Tensor) -> Tensor:
    """Where a block has a pair that is seen and should not be, or is not and should be; like ``blocks``."""
    b, h = (
        torch.arange(n, device=blocks.device).view(n, *[1] * k)
        for n, k in zip(blocks.shape, (3, 2), strict=False)
    )
    k = torch.arange(tiling.seq_len_k, device=blocks.device)
    of_k = (k // tiling.B_c).expand(*blocks.shape[:2], -1)
    rows = []
    for row, first in enumerate(range(0, tiling.seq_len_q, tiling.B_r)):
        q = torch.arange(first, min(first + tiling.B_r, tiling.seq_len_q), device=blocks.device)
        seen = evaluate(traced, "visible", None, b, h, q[:, None], k).expand(
            *blocks.shape[:2], len(q), len(k)
        )
        kind = blocks[:, :, row].gather(-1, of_k)
        wrong = torch.where(kind == Tile.FULL, ~seen.all(-2), seen.any(-2))
        found = torch.zeros(blocks[:, :, row].shape, dtype=torch.int8, device=blocks.device)
        rows.append(found.scatter_reduce(-1, of_k, wrong.to(torch.int8), "amax"))
    return torch.stack(rows, 2).bool()


def _map_of(found: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    found = found.contiguous()
    kept = [axis for axis in range(4) if axis > 1 or found.shape[axis] != 1]
    for axis in (1, 0):
        if axis not in kept:
            found = found.select(axis, 0)
    return found, tuple(kept)
