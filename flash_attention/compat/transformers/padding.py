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
        q_tokens = _query_tokens(meaning, q)
        rows_of = _all_rows if is_compiling else _token_rows
        remembered = q_tokens, rows_of(q_tokens), rows_of(meaning.tokens)
        if not is_compiling:
            meaning.memory["rows"] = remembered
    q_tokens, q_rows, k_rows = remembered
    offsets = (q_rows.offsets, k_rows.offsets, seq_len_q, seq_len_k)
    rows: Any = attention_varlen(q_rows.of(q), k_rows.of(k), k_rows.of(v), *offsets, **options)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    out[q_rows.items, q_rows.places] = rows
    return torch.where(q_tokens[:, :, None, None], out, 0.0) if is_compiling else out


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
    """The rows that are tokens, and behind them those of padding as sequences of their own, none longer than
    ``seq_len``: under torch.compile the number of rows must not depend on values."""
    batch, seq_len = tokens.shape
    is_token = tokens.flatten()
    rank = torch.where(
        is_token, is_token.cumsum(0) - 1, is_token.sum() + (~is_token).cumsum(0) - 1
    )  # the row's place behind the others
    order = torch.zeros_like(rank).scatter(0, rank, torch.arange(batch * seq_len, device=rank.device))
    n_padding = (~is_token).sum()
    before = torch.arange(batch, device=rank.device) * seq_len
    lengths = torch.cat((tokens.sum(1), (n_padding - before).clamp(0, seq_len)))
    return Rows(order // seq_len, order % seq_len, _offsets(lengths))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
