"""Attention of a padded batch: the tokens alone are packed and computed, with no row for padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention_varlen
from flash_attention.compat.transformers.masks import Meaning


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a (batch, seq_len, …) tensor, one sequence behind the other.

    Attributes:
        items, places: of each row.
        offsets: int32: 0, then the end of each sequence in the rows.
    """

    items: Tensor
    places: Tensor
    offsets: Tensor

    def of(self, x: Tensor) -> Tensor:
        return x[self.items, self.places]


def of_tokens(q: Tensor, k: Tensor, v: Tensor, meaning: Meaning, options: dict[str, Any]) -> Tensor:
    """Attention of the rows that are tokens; out is 0 where q is padding.

    Where the band has no limits, the queries may be other tokens than the keys, those of a decoder: all are
    taken.
    """
    assert meaning.tokens is not None
    seq_len_q, seq_len_k = q.shape[1], meaning.tokens.shape[1]
    is_compiling = torch.compiler.is_compiling()
    remembered = None if is_compiling else meaning.memory.get("rows")
    if remembered is None:
        rows_of = _all_rows if is_compiling else _token_rows
        remembered = rows_of(_query_tokens(meaning, q)), rows_of(meaning.tokens)
        if not is_compiling:
            meaning.memory["rows"] = remembered
    q_rows, k_rows = remembered
    offsets = (q_rows.offsets, k_rows.offsets, seq_len_q, seq_len_k)
    rows: Any = attention_varlen(q_rows.of(q), k_rows.of(k), k_rows.of(v), *offsets, **options)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    out[q_rows.items, q_rows.places] = rows
    return out


def _query_tokens(meaning: Meaning, q: Tensor) -> Tensor:
    """(batch, seq_len_q) bool: which queries are tokens."""
    tokens, seq_len_q = meaning.tokens, q.shape[1]
    assert tokens is not None
    if not meaning.band.has_limits:
        return tokens.new_ones(q.shape[:2])
    if meaning.counts is None:
        return tokens[:, tokens.shape[1] - seq_len_q :]
    places = meaning.counts[:, None] - seq_len_q + torch.arange(seq_len_q, device=tokens.device)
    return tokens.gather(1, places)


def _token_rows(tokens: Tensor) -> Rows:
    items, places = tokens.nonzero(as_tuple=True)
    return Rows(items, places, _offsets(tokens.sum(1)))


def _all_rows(tokens: Tensor) -> Rows:
    """The rows that are tokens, and behind them those of padding, which are of no sequence: attention writes
    0 there. Under torch.compile the number of rows must not depend on values."""
    order = tokens.flatten().int().argsort(descending=True, stable=True)
    seq_len = tokens.shape[1]
    return Rows(order // seq_len, order % seq_len, _offsets(tokens.sum(1)))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
