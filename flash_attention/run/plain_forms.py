"""Masks and scores of a call: options in the place of functions, where an option says the same."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flash_attention.call import Mask, Scores
from flash_attention.layouts import Dense, Layout
from flash_helpers.mods.plain_forms import Band, plain_form

_plain_form = lru_cache(1024)(plain_form)


def mask_and_scores(
    mask: Mask, scores: Scores, layout: Layout, seq_len_q: int, seq_len_k: int
) -> tuple[Mask, Scores]:
    """Both, with as much as possible said by options: kernels without functions are quicker.

    Args:
        mask, scores: as the call has them.
        layout: how rows form sequences. A mask function counts places from the first query and key, an option
            from the last ones: only of dense sequences is the difference of both lengths known.
        seq_len_q, seq_len_k: their lengths.
    """
    traced = scores.traced
    if traced is None:
        return mask, scores
    form = _plain_form(traced.mod, traced.numbers, isinstance(layout, Dense), not scores.softcap)
    if form.rest is traced.mod:
        return mask, scores
    rest = None if form.rest is None else replace(traced, mod=form.rest)
    said = Band(
        None if mask.left is None else seq_len_k - seq_len_q - mask.left,
        None if mask.right is None else seq_len_k - seq_len_q + mask.right,
    )
    low, high = form.band.within(said)
    mask = Mask(
        None if low is None else seq_len_k - seq_len_q - low,
        None if high is None else high - (seq_len_k - seq_len_q),
    )
    return mask, scores._replace(softcap=scores.softcap or form.softcap, traced=rest)
