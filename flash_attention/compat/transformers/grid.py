"""Mask functions that a band can't say, compared pair by pair with what this library can compute.

Transformers itself draws the grid of the pairs (query, key), as it does for its eager attention. The grid
must be a band, alone or within each of several packed sequences; otherwise the mask goes to ``functions``,
and a trace is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attention.compat.transformers.band import CAUSAL, EVERYTHING, Band
from flash_attention.compat.transformers.functions import grid_of
from flash_attention.torch_private import assert_async

PAIRS_AT_ONCE = 1 << 24  # bounds the memory of the comparison
# It names no function: a trace takes constants alone.
_TRACED_REFUSAL = (
    "the mask function of this model is neither causal, nor a window, nor packed sequences; a trace takes "
    "these and padding, and not other masks, such as images whose tokens see each other or chunks: call "
    'the model outside of torch.compile, or use attn_implementation="sdpa" or "eager"'
)


class NoBandError(Exception):
    """A mask is neither a band nor packed sequences."""


def read_grid(
    given: dict[str, Any], places: tuple[int | Tensor, int | Tensor], tokens: Tensor | None
) -> tuple[Band, Tensor | None]:
    """What the mask function in ``given`` lets queries see.

    Args:
        given: the arguments that Transformers passed to the mask interface.
        places: of the first query and of the first key.
        tokens: (batch, seq_len_k) bool, False for padding, of which nothing depends; None: there is none.

    Returns:
        the band, and (batch, seq_len) bool, True where a packed sequence starts; None: nothing is packed.

    Raises:
        NoBandError: it is neither.
    """
    grid = grid_of(given)
    starts = _starts(grid) if tokens is None and _is_square(grid, places) else None
    if torch.compiler.is_compiling():  # nothing can be read: the device asserts what the arguments say
        band = _announced_band(given)
        different = _differences(grid, band, starts, places, tokens, slice(0, grid.shape[2]))
        is_as_said = ~different.any()
        for place in places:
            if starts is not None and isinstance(place, Tensor):  # packed sequences begin with the cache
                is_as_said = is_as_said & ((place == 0) | ~starts[:, 1:].any())
        assert_async(is_as_said, _TRACED_REFUSAL)
        return band, starts
    if starts is not None and not starts[:, 1:].any():
        starts = None
    first: list[int] = []
    for band in _likely_bands(given):
        first = _first_difference(grid, band, starts, places, tokens)
        if not first:
            return band, starts
    item, query, key = first
    raise NoBandError(f"first seen at query {query} and key {key} of item {item}")


def _is_square(grid: Tensor, places: tuple[int | Tensor, int | Tensor]) -> bool:
    """Whether queries and keys are the same tokens. A place that is on the device may be 0."""
    starts_at_zero = all(isinstance(place, Tensor) or place == 0 for place in places)
    return grid.shape[2] == grid.shape[3] and starts_at_zero


def _starts(grid: Tensor) -> Tensor:
    """A token that does not see the one before it starts a sequence."""
    sees_previous = grid[:, 0].diagonal(-1, dim1=1, dim2=2)
    return torch.nn.functional.pad(~sees_previous, (1, 0), value=True)


def _announced_band(given: dict[str, Any]) -> Band:
    """What Transformers says to its SDPA beside the mask function."""
    last = None if given.get("local_size") is None else given["local_size"] - 1
    if "allow_is_bidirectional_skip" in given:
        return Band(given.get("local_size"), given.get("local_size"))
    return Band(last, 0)


def _likely_bands(given: dict[str, Any]) -> Iterator[Band]:
    yield CAUSAL
    yield EVERYTHING
    size = given.get("local_size")
    if size is not None:
        yield Band(size - 1, 0)
        yield Band(size, size)


def _first_difference(
    grid: Tensor,
    band: Band,
    starts: Tensor | None,
    places: tuple[int | Tensor, int | Tensor],
    tokens: Tensor | None,
) -> list[int]:
    """Item, query and key of the first pair in which band and grid differ; empty: there is none."""
    step = max(1, PAIRS_AT_ONCE // max(1, grid.shape[0] * grid.shape[3]))
    for begin in range(0, grid.shape[2], step):
        rows = slice(begin, min(begin + step, grid.shape[2]))
        found = _differences(grid, band, starts, places, tokens, rows).nonzero()
        if len(found):
            item, _, query, key = found[0].tolist()
            return [item, begin + query, key]
    return []


def _differences(
    grid: Tensor,
    band: Band,
    starts: Tensor | None,
    places: tuple[int | Tensor, int | Tensor],
    tokens: Tensor | None,
    rows: slice,
) -> Tensor:
    q_place, k_place = places
    queries = torch.arange(rows.start, rows.stop, device=grid.device)
    keys = torch.arange(grid.shape[3], device=grid.device)
    distance = (keys + k_place) - (queries[:, None] + q_place)
    expected = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        expected = expected & (distance >= -band.left)
    if band.right is not None:
        expected = expected & (distance <= band.right)
    if starts is not None:
        sequence = starts.cumsum(1)
        expected = expected & (sequence[:, rows, None] == sequence[:, None, :])
        expected = expected[:, None]
    different = grid[:, :, rows] != expected
    if tokens is not None:
        different = different & tokens[:, None, None, :]
        place = (queries + q_place - k_place).expand(tokens.shape[0], -1)
        inside = (place >= 0) & (place < tokens.shape[1])
        token_rows = tokens.gather(1, place.clamp(0, tokens.shape[1] - 1)) | ~inside
        different = different & token_rows[:, None, :, None]
    return different
