"""The user's functions of a call: what they do, and a ``BlockMask`` as one of them."""

from __future__ import annotations

from torch import Tensor

from flash_attention.layouts import Dense, Layout
from flash_attention.mods.block_mask import check_block_mask, is_block_mask, mask_of_blocks, mask_of_lists
from flash_attention.mods.remembered import recorded
from flash_attention.mods.tracing import Traced
from flash_attention.options import MaskMod, Options


def traced_functions(options: Options, q: object, k: object, layout: Layout) -> Traced | None:
    """What the user's functions do; they are called here, once each, unless they are as they
    were before. None: there are none.

    Also None where q is no tensor, which the checks refuse.
    """
    if not (options.has_mods and isinstance(q, Tensor)):
        return None
    mask_mod = mask_function(options.mask_mod, q, k, layout)
    return recorded(options.score_mod, mask_mod, q.device)


def mask_function(
    mask_mod: object, q: Tensor, k: object, layout: Layout, *, is_read: bool = True
) -> MaskMod | None:
    """``mask_mod`` as a function, where it is a ``BlockMask``.

    Args:
        is_read: its lists may be read now, and need not be used where they say what its function says.
    """
    if not is_block_mask(mask_mod):
        return mask_mod  # type: ignore[return-value]
    if not isinstance(layout, Dense):
        raise NotImplementedError(
            "mask_mod is a BlockMask, which lists blocks of batch items of one length; packed sequences "
            "and caches count places within each: pass its mask_mod"
        )
    if isinstance(k, Tensor) and q.ndim == k.ndim == 4:  # the checks refuse others
        batch, seq_len_q, seq_len_k = layout.sizes(q, k)
        check_block_mask(mask_mod, batch, q.shape[2], seq_len_q, seq_len_k)
    return mask_of_blocks(mask_mod) if is_read else mask_of_lists(mask_mod)
